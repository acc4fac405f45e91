"""Where an op was called from: lines of the user's code, and the modules whose forward is running.

Owns which files are the user's. Torch, the standard library and this package are not; an installed model library is.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

import torch

MAX_STACK: Final = 8
_AUTOGRAD: Final = str(Path(torch.__file__).parent / "autograd" / "graph.py")
_LIBRARY: Final = sysconfig.get_paths()["stdlib"]
_PACKAGES: Final = tuple({sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]})
_FOREIGN: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_known: dict[str, bool] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's code."""

    file: str
    line: int
    stack: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        """``file.py:12``."""
        return f"{Path(self.file).name}:{self.line}"

    @property
    def code(self) -> str:
        """Text of the line."""
        return linecache.getline(self.file, self.line).strip()


def is_users(file: str) -> bool:
    """True if ``file`` is neither torch nor the standard library nor ours."""
    known = _known.get(file)
    if known is None:
        in_library = file.startswith(_LIBRARY) and not file.startswith(_PACKAGES)
        known = _known[file] = not (file.startswith(_FOREIGN) or in_library)
    return known


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames of the user's code, innermost first."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def place() -> Place | None:
    """The innermost line of the user's code on this thread's stack, with the lines that called it."""
    frames = list(user_frames(sys._getframe(1)))
    if not frames:
        return None
    stack = tuple(f"{Path(f.f_code.co_filename).name}:{f.f_lineno}" for f in frames[:MAX_STACK])
    return Place(os.path.abspath(frames[0].f_code.co_filename), frames[0].f_lineno, stack)  # noqa: PTH100


def quick_place() -> tuple[str, int] | None:
    """File and number of the innermost line of the user's code: for every op of a forward, so nothing more."""
    for frame in user_frames(sys._getframe(1)):
        return os.path.abspath(frame.f_code.co_filename), frame.f_lineno  # noqa: PTH100
    return None


def place_inside_backward() -> Place | None:
    """The user's line that runs as part of a backward (a custom Function, a hook), None if the engine runs a node of torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _AUTOGRAD:
        if is_users(frame.f_code.co_filename):
            return place()
        frame = frame.f_back
    return None


def user_locals() -> list[Any]:
    """Values of the local variables (of a script's top level: its globals) of every frame of the user's code."""
    frames = list(user_frames(sys._getframe(1)))
    return [value for frame in frames for value in list(frame.f_locals.values()) if not isinstance(value, ModuleType)]


class ModuleStack:
    """Modules whose forward is running, and what they are called."""

    def __init__(self) -> None:
        self._running: list[torch.nn.Module] = []
        self._names: dict[int, str] = {}

    def name(self, root: torch.nn.Module, of: str = "") -> None:
        """Learn the names of a root's submodules; ``of`` goes before them where there are several roots."""
        for name, module in root.named_modules():
            clean = name.removeprefix("module").removeprefix(".")
            self._names.setdefault(id(module), f"{of}{clean}" or type(module).__name__)

    def enter(self, module: torch.nn.Module) -> None:
        """The module's forward begins."""
        self._running.append(module)

    def leave(self) -> None:
        """The innermost forward has ended."""
        self._running.pop()

    @property
    def depth(self) -> int:
        """How many forwards are running."""
        return len(self._running)

    @property
    def current(self) -> str | None:
        """Name of the innermost running module."""
        if not self._running:
            return None
        module = self._running[-1]
        return self._names.get(id(module), type(module).__name__)
