"""Parts of a bundle that a test asks the agent for, and what came of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentinel.bundle.manifest import PART_FILE, PartHeader
from sentinel_agent.dump import PartRequest, PartResult
from sentinel_agent.window import Window


def request(run_dir: Path, **changes: Any) -> PartRequest:
    """A request for rank 1's part of round 3, with some fields changed."""
    fields: dict[str, Any] = {
        "run_dir": run_dir,
        "run_id": "run",
        "attempt": 0,
        "rank": 1,
        "world_size": 2,
        "node": 0,
        "round": 3,
        "step": 3,
        "state_after_step": False,
        "reason": "a test",
    }
    return PartRequest(**(fields | changes))


def header_of(result: PartResult) -> PartHeader:
    """The header of a part that was written without an error."""
    assert result.error == ""
    return PartHeader.model_validate_json((Path(result.directory) / PART_FILE).read_bytes())


def window_of(*batches: object, **options: int) -> Window:
    """A window that caught these batches from a loader in its open round."""
    window = Window(**options)
    for batch in batches:
        window.loader_batch(batch, [7, 8], window.before_batch())
    return window


def leftovers(run_dir: Path) -> list[str]:
    """Everything that lies in the run's bundles, hidden names too."""
    return sorted(path.name for path in run_dir.glob("bundles/*/*"))
