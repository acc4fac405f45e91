"""``run.json``: what a run directory says about its run, also when Sentinel itself could not start whole.

Owns the record's shape and its writing. Incidents are the coordinator's, in its database.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from sentinel.wire.names import RUN_FILE

RUNS_FOLDER = "sentinel-runs"


class RunRecord(BaseModel):
    """Everything the launcher of one node knows about its run. Times are RFC 3339, UTC; secrets are never in it."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    run_id: str
    node: int = 0
    argv: tuple[str, ...]
    versions: dict[str, str]
    started_at: datetime
    endpoint: str | None = None
    http: str | None = None
    coordinator: Literal["embedded", "joined", "none"] = "none"
    world_size: int = 0  # 0: not fixed by the command line
    degraded: tuple[str, ...] = ()  # what of Sentinel did not start, with the reason
    finished_at: datetime | None = None
    exit_code: int | None = None
    unsent_critical: int = 0
    drops: dict[str, int] = {}

    def write(self, run_dir: Path) -> None:
        """Replace ``run.json`` whole, mode 0600. Raises OSError."""
        tmp = run_dir / f".{RUN_FILE}.{os.getpid()}"
        fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as out:
            out.write(self.model_dump_json(indent=1))
        tmp.replace(run_dir / RUN_FILE)


def new_run_id(now: datetime) -> str:
    """A run id that sorts by time and is unique enough: ``20261130-165912-4f1c9a``."""
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def make_run_directory(run_dir: Path) -> None:
    """Make the run directory, readable by this user only, and prove that it can be written. Raises OSError."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    probe = run_dir / f".writable-{os.getpid()}"
    probe.touch()
    probe.unlink()


def default_run_directory(name: str) -> Path:
    """Where a run called ``name`` is left if the user names no directory."""
    return Path(RUNS_FOLDER, name).absolute()


def utc_now() -> datetime:
    """Now, aware, UTC."""
    return datetime.now(UTC)


def redacted(argv: Sequence[str]) -> tuple[str, ...]:
    """``argv`` without the values of words that look like secrets (``--api-key X``, ``--token=X``)."""
    shown, hide = [], False
    for word in argv:
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and any(part in name.lower() for part in ("key", "token", "secret", "password"))
        if hide and not word.startswith("-"):
            shown.append("***")
        else:
            shown.append(f"{name}=***" if secret and equals else word)
        hide = secret and not equals
    return tuple(shown)
