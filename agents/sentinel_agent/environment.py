"""Where this process runs, as a bundle records it: enough to start it again, nothing that is secret.

Owns which variables and arguments may be written down. Reads ``.git`` files itself: a training process starts no subprocess.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch

from sentinel.bundle.manifest import Environment

HIDDEN: Final = "[redacted]"

# fmt: off
_NAMES: Final = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "NODE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED",
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG",
    "HIP_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE",
})
# fmt: on
_PREFIXES: Final = ("TORCH", "NCCL", "GLOO", "RCCL", "FI_", "UCX_", "PYTORCH_")
_SECRET: Final = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_MAX_GIT_FILE: Final = 4 << 20


def environment() -> Environment:
    """The environment of this process now, redacted."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    cwd = _cwd()
    return Environment(
        argv=redacted_arguments(sys.argv),
        cwd=str(cwd),
        python=platform.python_version(),
        torch=str(torch.__version__),
        host=socket.gethostname(),
        pid=os.getpid(),
        git_commit=git_commit(cwd / script.parent) or git_commit(cwd),
        variables=harmless_variables(os.environ),
        module=started_module(),
    )


def started_module() -> str | None:
    """``package.module`` if this process was started with ``python -m``, else None."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None:
        return None
    return str(spec.name).removesuffix(".__main__")


def harmless_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables whose names are known to be harmless; a name that smells of a secret never is."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if (name in _NAMES or name.startswith(_PREFIXES)) and not _SECRET.search(name)
    }


def redacted_arguments(arguments: Iterable[str]) -> tuple[str, ...]:
    """A command line with the values of options such as ``--api-key`` hidden, in both spellings."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        option, equals, _value = argument.partition("=")
        secret = bool(_SECRET.search(option))
        if secret and equals:
            shown.append(f"{option}={HIDDEN}")
        elif hide_next and not argument.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(argument)
        hide_next = secret and not equals and argument.startswith("-")
    return tuple(shown)


def git_commit(directory: Path) -> str | None:
    """Commit that the checkout around ``directory`` has checked out; None if there is none or it cannot be read."""
    try:
        git = next((d / ".git" for d in (directory, *directory.absolute().parents) if (d / ".git").exists()), None)
        return None if git is None else _head(_git_directory(git))
    except (OSError, ValueError):
        return None


def _git_directory(git: Path) -> Path:
    """Of a worktree or submodule, ``.git`` is a file that says where the directory is."""
    if git.is_dir():
        return git
    return git.parent / _read(git).removeprefix("gitdir:").strip()


def _head(git: Path) -> str | None:
    head = _read(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return _commit(head)
    ref = head.removeprefix("ref:").strip()
    shared = git / "commondir"
    roots = [git, git / _read(shared).strip()] if shared.exists() else [git]
    for root in roots:
        if (root / ref).is_file():
            return _commit(_read(root / ref).strip())
        if (root / "packed-refs").is_file():
            for line in _read(root / "packed-refs").splitlines():
                if line.endswith(f" {ref}"):
                    return _commit(line.split()[0])
    return None


def _commit(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None


def _read(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as source:
        return source.read(_MAX_GIT_FILE)


def _cwd() -> Path:
    try:
        return Path.cwd()
    except OSError:  # deleted under us
        return Path("/")


def assume(variables: Mapping[str, str]) -> None:
    """Give this process the variables of another, as a replay does."""
    os.environ.update(variables)
