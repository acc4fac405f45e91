"""Where on the coordinator's disk a run's bundles belong.

Owns that mapping. Names of files inside a bundle belong to ``sentinel/bundle``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from sentinel.bundle.commit import PresentPart
from sentinel.wire.names import BUNDLES, rank_directory

RUNS = "runs"


def run_directory(run_dir: Path, run_id: str, *, standalone: bool) -> Path:
    """Directory of one run: the run directory itself, or a folder below a standalone coordinator's for each run."""
    return run_dir / RUNS / slug(run_id) if standalone else run_dir


def slug(run_id: str) -> str:
    """A folder name for any run id: readable where it can be, and different for different ids."""
    readable = re.sub(r"[^A-Za-z0-9-]+", "-", run_id).strip("-")[:48]
    return f"{readable or 'run'}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


def bundle_root(directory: Path, bundle: str, parts: Iterable[PresentPart]) -> Path:
    """The directory whose ``bundles/`` the manifest goes to: the launcher's own if its parts lie on this host, else ours.

    A part's path comes from a peer. It is followed only where it has the very shape a rank gives it and lies in directories
    of this user, and the manifest is written only next to parts whose header names this run (``bundle/commit.py``).
    """
    if (directory / BUNDLES / bundle).is_dir():
        return directory
    for part in parts:
        path = Path(part.directory)
        expected = (BUNDLES, bundle, rank_directory(part.rank))
        if path.is_absolute() and ".." not in path.parts and path.parts[-3:] == expected and _is_ours(path):
            return path.parents[2]
    return directory


def _is_ours(path: Path) -> bool:
    try:
        return all(os.lstat(p).st_uid == os.geteuid() and not p.is_symlink() for p in (path, path.parent))
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False
