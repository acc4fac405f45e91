"""The seed's example in its short form: both faults are found, proven and repaired by real training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from loading import SCRIPTS

pytestmark = pytest.mark.e2e
STORY = SCRIPTS / "seed_example" / "story.py"


def test_the_seeds_example_keeps_its_promises(tmp_path: Path) -> None:
    """Division and flat sample, halt, the loss that overflows float16, lint, and no incident once both are repaired."""
    words = ["--steps", "220", "--breaks", "48", "--folder", str(tmp_path)]
    told = subprocess.run([sys.executable, str(STORY), *words], capture_output=True, text=True, timeout=280)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "NOT KEPT" not in told.stdout
    assert told.stdout.count("kept: ") == 13, told.stdout
    assert told.stdout.rstrip().splitlines()[-1].startswith("0 promises not kept")
