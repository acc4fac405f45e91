"""Holds a scene of the demo to its promise: reads ``sentinel incidents ls -o json`` on stdin, exits 1 if it tells another story.

usage: sentinel incidents ls --run-dir DIR -o json | scripts/demo_check.py SCENE
"""

from __future__ import annotations

import json
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


def main() -> int:
    """Check the scene named on the command line."""
    scene = sys.argv[1]
    try:
        wrong = check(scene, json.load(sys.stdin)["incidents"])
    except (ValueError, KeyError) as error:
        wrong = f"sentinel incidents ls printed no list of incidents ({type(error).__name__})"
    if wrong:
        print(f"sentinel: error: scene {scene}: {wrong}\nhint: sentinel doctor checks this machine", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
