"""The scripts a stranger starts with: what they say on a machine that lacks something, and that the second run is free."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What a minimal Debian has; python and apt-get are added, or not, by each test.
TOOLS = ("bash", "cat", "cut", "dirname", "env", "grep", "id", "mktemp", "sha256sum", "tail", "tee", "uname", "rm")


class Machine:
    """A copy of the checkout's scripts, and a PATH that holds only what the test puts there."""

    def __init__(self, place: Path) -> None:
        self.root = place / "checkout"
        self.bin = place / "bin"
        self.bin.mkdir()
        (self.root / "tests").mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self.bin / tool).symlink_to(found)

    def add(self, name: str, script: str) -> None:
        """A program on the PATH."""
        self.program(self.bin / name, script)

    @staticmethod
    def program(path: Path, script: str) -> None:
        """An executable shell script."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def run(self, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """One of the scripts, without a terminal."""
        return subprocess.run(
            [self.root / "scripts" / script, *words],
            env={"PATH": str(self.bin), "HOME": str(self.root), **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def stamp(self) -> None:
        """Mark .venv as set up for this pyproject.toml, as bootstrap does."""
        program = f'source "{self.root}/scripts/bootstrap.sh"'
        sourced = (self.root / "scripts" / "bootstrap.sh").read_text().rsplit("\nbootstrap\n", 1)[0]
        wanted = subprocess.run(
            ["bash", "-c", f'BASH_SOURCE[0]="{self.root}/scripts/x"\n' + sourced.replace('"${BASH_SOURCE[0]}"', f'"{self.root}/scripts/x"') + "\nwanted_stamp"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert program
        (self.root / ".venv" / ".stamp").write_text(wanted.stdout.strip())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with bash and coreutils only."""
    return Machine(tmp_path)
