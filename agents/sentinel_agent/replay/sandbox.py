"""Turns aside whatever a replayed script would write outside of the replay's scratch directory, and lists it.

Owns what counts as a write and where it goes instead: checkpoints of torch, DCP and safetensors are left out, files opened for
writing land in the scratch directory, renames and removals do nothing. What slips past that is refused by an audit hook. Reads
are free.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from sentinel_agent.inject.lazy import after_import
from sentinel_agent.patching import wrap

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FREE: Final = ("/dev/", "/proc/")
_CHANGES: Final = (
    "mkdir",
    "rmdir",
    "remove",
    "unlink",
    "rename",
    "replace",
    "symlink",
    "link",
    "truncate",
    "chmod",
    "utime",
)
_AUDITED: Final = {
    "os.mkdir": 0,
    "os.rmdir": 0,
    "os.remove": 0,
    "os.rename": 1,
    "os.symlink": 1,
    "os.link": 1,
    "os.truncate": 0,
    "os.chmod": 0,
    "shutil.rmtree": 0,
}
TRACKERS_OFF: Final = {
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug",
    "MLFLOW_TRACKING_URI": "",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "CLEARML_OFFLINE_MODE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiled regions run eagerly, where their ops can be followed
}
"""Experiment trackers stay silent."""
MAX_LISTED: Final = 200


class Sandbox:
    """What was turned aside. ``scratch`` exists already and is the only place that gets written."""

    def __init__(self, scratch: Path) -> None:
        self.diverted: dict[str, None] = {}
        self._scratch = str(scratch.resolve())
        self._aside = Path(self._scratch, "aside")

    def install(self) -> None:
        """Patch and watch this process for good."""
        sys.dont_write_bytecode = True
        temporary = Path(self._scratch, "tmp")
        temporary.mkdir(exist_ok=True)
        tempfile.tempdir = str(temporary)
        wrap(io, "open", self._open)
        builtins.open = io.open
        wrap(os, "open", self._os_open)
        for name in _CHANGES:
            wrap(os, name, functools.partial(self._change, name))
        wrap(shutil, "rmtree", functools.partial(self._change, "rmtree"))
        wrap(sqlite3, "connect", self._connect)
        wrap(torch, "save", lambda original: self._save(original, "torch.save", 1, "f"))
        after_import({name: self._saver(*how) for name, how in _SAVERS.items()})
        sys.addaudithook(self._audit)

    def note(self, what: str, path: object) -> None:
        """List something that was turned aside."""
        if len(self.diverted) < MAX_LISTED:
            self.diverted[f"{what} {path}"] = None

    def outside(self, path: object) -> str | None:
        """The absolute path if it lies where the replay may not write; None for descriptors and the scratch directory."""
        if isinstance(path, int) or path is None:
            return None
        try:
            full = os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]  # noqa: PTH100 - resolves no links
        except TypeError:
            return None
        inside = full == self._scratch or full.startswith((self._scratch + os.sep, *_FREE))
        return None if inside else full

    def _moved(self, full: str) -> str:
        """Where a file is written instead; its folder exists afterwards."""
        target = self._aside / full.lstrip(os.sep)
        target.parent.mkdir(parents=True, exist_ok=True)
        return str(target)

    def _open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            full = self.outside(file)
            if full is None:
                return original(file, mode, *args, **kwargs)
            moved = str(self._aside / full.lstrip(os.sep))
            if not set(mode) & set("wax+"):
                return original(moved if os.path.exists(moved) else file, mode, *args, **kwargs)  # noqa: PTH110
            self.note("opened for writing:", full)
            moved = self._moved(full)
            if set(mode) & set("a+") and "w" not in mode and os.path.isfile(full) and not os.path.exists(moved):  # noqa: PTH110, PTH113
                shutil.copyfile(full, moved)
            return original(moved, mode, *args, **kwargs)

        return opened

    def _os_open(self, original: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            full = self.outside(path) if flags & _WRITING and kwargs.get("dir_fd") is None else None
            if full is None:
                return original(path, flags, *args, **kwargs)
            self.note("opened for writing:", full)
            return original(self._moved(full), flags, *args, **kwargs)

        return opened

    def _change(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            paths = [full for path in args[:2] if (full := self.outside(path)) is not None]
            if not paths or (
                name in ("truncate", "chmod", "utime", "mkdir", "rmtree") and self.outside(args[0]) is None
            ):
                return original(*args, **kwargs)
            self.note(f"{name}:", paths[-1])
            return None

        return change

    def _connect(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
            full = None if database == ":memory:" else self.outside(database)
            if full is None:
                return original(database, *args, **kwargs)
            self.note("database:", full)
            return original(":memory:", *args, **kwargs)

        return connect

    def _saver(self, function: str, position: int, keyword: str) -> Callable[[Any], None]:
        def patch(module: Any) -> None:
            name = f"{module.__name__}.{function}"
            wrap(module, function, lambda original: self._save(original, name, position, keyword))

        return patch

    def _save(self, original: Callable[..., Any], name: str, position: int, keyword: str) -> Callable[..., Any]:
        """A save is left out as a whole: large checkpoints of every step would fill the disk for nothing."""

        def save(*args: Any, **kwargs: Any) -> Any:
            target = kwargs.get(keyword, args[position] if position < len(args) else None)
            if isinstance(target, io.BytesIO):
                return original(*args, **kwargs)
            path = getattr(target, "name", target)
            self.note(f"{name}:", self.outside(path) or path)
            return None

        return save

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _mode, flags = args
            if isinstance(flags, int) and flags & _WRITING and self.outside(path) is not None:
                self._refuse(path)
        elif event in _AUDITED and self.outside(args[_AUDITED[event]]) is not None:
            self._refuse(args[_AUDITED[event]])

    def _refuse(self, path: object) -> None:
        self.note("refused:", path)
        raise PermissionError(f"a replay writes nothing outside of its scratch directory: {path}")


_SAVERS: Final = {
    "safetensors.torch": ("save_file", 1, "filename"),
    "safetensors.numpy": ("save_file", 1, "filename"),
    "torch.distributed.checkpoint.state_dict_saver": ("save", 1, "checkpoint_id"),
}
