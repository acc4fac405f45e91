"""The demo's scenes and the seed's example: real training, each with the story it promises, and the README quoting the demo."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from loading import SCRIPTS, load_script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
ROOT = SCRIPTS.parent
demo_check = load_script("demo_check")
STORY = SCRIPTS / "seed_example" / "story.py"


def sentinel(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``sentinel`` as its own process."""
    command = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "sentinel.cli.main", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)


def readme_blocks() -> dict[str, str]:
    """The quoted ends of the scenes, by scene."""
    quoted = (ROOT / "README.md").read_text().split("<!-- demo output -->")[1].split("<!-- end demo output -->")[0]
    segmentation, overflow = re.findall(r"```text\n(.*?)```", quoted, re.DOTALL)
    healthy = re.findall(r"`(sentinel: no incidents[^`]*)`", quoted)
    return {"segmentation": segmentation, "overflow": overflow, "healthy": healthy[0]}


@pytest.mark.parametrize("scene", sorted(demo_check.EXPECTED))
def test_scene_tells_its_story(tmp_path: Path, scene: str) -> None:
    """Each scene trains to its end, has exactly the incident it promises, and ends with what the README quotes."""
    script = str(SCRIPTS / "demo_scenes" / f"{scene}.py")
    run_dir = f"demo-run/{scene}"
    ran = sentinel(tmp_path, "run", "--standalone", "--nproc-per-node", "2", "--sentinel-run-dir", run_dir, script)
    assert ran.returncode == 0, ran.stderr
    listed = sentinel(tmp_path, "incidents", "ls", "--run-dir", run_dir, "-o", "json")
    incidents = json.loads(listed.stdout)["incidents"]
    assert demo_check.check(scene, incidents) == ""
    assert listed.returncode == (3 if incidents else 0)
    status = json.loads(sentinel(tmp_path, "status", "--run-dir", run_dir, "-o", "json").stdout)
    assert demo_check.rounds_checked(status) > 0
    said = set(ran.stderr.splitlines())
    missing = [line for line in readme_blocks()[scene].splitlines() if line and not any(line in one for one in said)]
    assert not missing, ran.stderr


def test_scene_runs_under_plain_torchrun(tmp_path: Path) -> None:
    """The script of a scene is ordinary PyTorch: torchrun runs it without Sentinel, to the same losses."""
    script = str(SCRIPTS / "demo_scenes" / "segmentation.py")
    flags = ["--standalone", "--nproc-per-node", "2", script]
    plain = subprocess.run(
        ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "torch.distributed.run", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    watched = sentinel(tmp_path, "run", *flags)
    assert plain.returncode == watched.returncode == 0
    assert plain.stdout == watched.stdout
    assert "Dice 0." in plain.stdout
    for scene in (SCRIPTS / "demo_scenes").glob("*.py"):
        assert not re.search(r"^\s*(import|from) sentinel", scene.read_text(), re.MULTILINE), scene.name


def test_the_seeds_example_keeps_its_promises(tmp_path: Path) -> None:
    """Division and flat sample, halt, the loss that overflows float16, lint, and no incident once both are repaired."""
    words = ["--steps", "220", "--breaks", "48", "--folder", str(tmp_path)]
    told = subprocess.run([sys.executable, str(STORY), *words], capture_output=True, text=True, timeout=280)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "NOT KEPT" not in told.stdout
    assert told.stdout.count("kept: ") == 13, told.stdout
    assert told.stdout.rstrip().splitlines()[-1].startswith("0 promises not kept")
