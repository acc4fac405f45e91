"""Trainings whose bundles are replayed: started under the launcher, replayed through the command line, read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).parent / "replay" / "scripts"
SENTINEL = (sys.executable, "-m", "sentinel.cli.main")
RUN_SECONDS = 100.0


class Recorded(NamedTuple):
    """A training that has ended: its folder and its first bundle."""

    place: Path
    bundle: Path

    def replay(self, *flags: str, code: int = 0) -> dict[str, Any]:
        """``sentinel replay BUNDLE -o json``, with the exit code held to."""
        ran = sentinel(["replay", str(self.bundle), "-o", "json", *flags], self.place)
        assert ran.returncode == code, ran.stderr
        return json.loads(ran.stdout)  # type: ignore[no-any-return]


def sentinel(words: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """One command of ours, one thread a rank, in ``cwd``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "PET_", "PYTHONPATH"))}
    env = {**kept, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([*SENTINEL, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=RUN_SECONDS)


Record = Callable[..., Recorded]


def train(place: Path, script: str, arguments: tuple[str, ...], ranks: int, options: dict[str, Any]) -> Recorded:
    """Train a script in ``place``; its first bundle."""
    (place / script).write_text((SCRIPTS / script).read_text())
    flags = ["--sentinel-run-dir", str(place / "run"), "--standalone", "--nproc-per-node", str(ranks)]
    variables = {"SENTINEL_AGENT_OPTIONS": json.dumps(options)} if options else {}
    ran = sentinel(["run", *flags, script, *arguments], place, **variables)
    bundles = sorted((place / "run" / "bundles").glob("a0-*"))
    assert bundles, ran.stdout + ran.stderr
    return Recorded(place, bundles[0])
