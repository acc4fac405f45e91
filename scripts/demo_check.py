"""Holds a scene of the demo to its promise: asks ``sentinel incidents ls`` and ``status``, exits 1 if they tell another story.

usage: scripts/demo_check.py SCENE RUN_DIR
"""

from __future__ import annotations

import json
import subprocess
import sys

EXPECTED: dict[str, dict[str, object] | None] = {
    "segmentation": {
        "kind": "nonfinite_gradient",
        "stage": "pre_reduce",
        "attribution": "rank_local",
        "suspect_ranks": [1],
        "step": 7,
    },
    "overflow": {
        "kind": "nonfinite_gradient",
        "stage": "post_reduce",
        "attribution": "reduction_induced",
        "suspect_ranks": [],
        "step": 4,
    },
    "healthy": None,
}


def check(scene: str, incidents: list[dict[str, object]]) -> str:
    """What is wrong with a scene's incidents, empty if nothing is."""
    expected = EXPECTED[scene]
    if expected is None:
        return f"{len(incidents)} incident(s) where there should be none" if incidents else ""
    if len(incidents) != 1:
        return f"{len(incidents)} incidents where there should be one"
    seen = {name: incidents[0].get(name) for name in expected}
    if seen != expected:
        return f"expected {expected}, saw {seen}"
    return "" if incidents[0].get("bundle") else "no bundle was kept"


def ask(*words: str) -> dict[str, object]:
    """The JSON that a command of ``sentinel`` prints. Raises ValueError if it prints none."""
    command = [sys.executable, "-m", "sentinel.cli.main", *words, "-o", "json"]
    answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60).stdout)
    if not isinstance(answer, dict):
        raise ValueError("not an object")
    return answer


def rounds_checked(status: dict[str, object]) -> int:
    """Rounds of the one run of a status."""
    (run,) = status["runs"]  # type: ignore[misc, attr-defined]
    return int(run["counts"].get("rounds_checked", 0))


def main() -> int:
    """Check the scene named on the command line, in the run directory named after it."""
    scene, run_dir = sys.argv[1:]
    try:
        wrong = check(scene, ask("incidents", "ls", "--run-dir", run_dir)["incidents"])  # type: ignore[arg-type]
        if not rounds_checked(ask("status", "--run-dir", run_dir)):
            wrong = "no round of the training was checked"
    except (ValueError, KeyError) as error:
        wrong = f"{run_dir} cannot be read ({type(error).__name__}: {error})"
    if wrong:
        print(f"sentinel: error: scene {scene}: {wrong}\nhint: sentinel doctor checks this machine", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
