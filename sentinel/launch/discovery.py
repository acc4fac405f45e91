"""Telling a Prometheus on this host where a run's coordinator is: a file_sd target file while the run goes on.

Owns the file's content, its places and its life. Scraping needs nothing of it; a coordinator elsewhere has its own target.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

TARGETS_FILE = "targets.json"


@dataclass(frozen=True, slots=True)
class Announcement:
    """The target files of one run."""

    paths: tuple[Path, ...]

    def withdraw(self) -> None:
        """Take the target away: a run that is over is not a coordinator that is down."""
        for path in self.paths:
            with contextlib.suppress(OSError):
                path.unlink()


def announce(http: str, run_id: str, run_dir: Path, targets_dir: Path | None = None) -> Announcement:
    """Write ``run_dir/targets.json``, and a file named after the run into ``targets_dir``, each whole or not at all.

    ``http`` is the address of the coordinator's pages. Raises OSError.
    """
    content = json.dumps([{"targets": [urlsplit(http).netloc]}])
    paths = [run_dir / TARGETS_FILE]
    if targets_dir is not None:
        paths.append(targets_dir / f"{_file_name(run_id)}.json")
    for path in paths:
        _replace(path, content)
    return Announcement(tuple(paths))


def _replace(path: Path, content: str) -> None:
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # Readable by the Prometheus user: it holds an address and no secret.
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(fd, "w") as out:
        out.write(content)
    tmp.replace(path)


def _file_name(run_id: str) -> str:
    """A file name for any run id, different for different ids."""
    readable = re.sub(r"[^A-Za-z0-9-]+", "-", run_id).strip("-")[:48]
    if readable and readable == run_id:
        return readable
    return f"{readable or 'run'}-{hashlib.sha256(run_id.encode('utf-8', 'replace')).hexdigest()[:8]}"
