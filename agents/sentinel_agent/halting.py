"""The end of a training that the guard halts: every rank's part is on disk before the first rank raises.

Owns the wait for the other ranks and the mark that tells this node's launcher not to restart. A rank that raised at once would get
the others killed by the launcher in the middle of their writing.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from sentinel.wire.names import HALTED_FILE
from sentinel_agent.agreement import KEY, own_client
from sentinel_agent.errors import Health

MAX_WAIT_SECONDS = 60.0
PAUSE_SECONDS = 0.02


class NonFiniteGradientError(RuntimeError):
    """Raised from ``optimizer.step`` on every rank, in the same round, by a guard that halts. ``step`` is the user's."""

    def __init__(self, step: int, missing: int | None) -> None:
        missed = {0: "no rank is still writing its part", None: "whether other ranks are still writing is not known"}
        written = missed.get(missing, f"{missing} ranks did not come, and may still be writing")
        super().__init__(
            f"gradients of step {step} are nonfinite and Sentinel's guard halts the training: "
            f"nothing was applied to the parameters; {written}"
        )
        self.step = step


def halt(
    run_dir: Path, attempt: int, rank: int, world_size: int, closed: tuple[int, int], health: Health
) -> int | None:
    """Mark the run and wait for the other ranks. ``closed`` is the (round, step) of the fault. Returns how many did not come,
    None if that cannot be known; never raises."""
    number, step = closed
    health.guarded("halt_mark", mark, even_off=True)(run_dir, rank, number, step)
    return health.guarded("halt_wait", wait_for_all, even_off=True)(attempt, number, world_size)


def mark(run_dir: Path, rank: int, round_: int, step: int) -> None:
    """Leave the mark that this run was halted on purpose. Raises OSError."""
    text = json.dumps({"rank": rank, "round": round_, "step": step})
    tmp = run_dir / f".{HALTED_FILE}.{rank}"
    tmp.write_text(text)
    tmp.replace(run_dir / HALTED_FILE)


def unmark(run_dir: Path) -> None:
    """Training went on, as somebody caught the error: a later failure is none of the guard's. Raises OSError."""
    (run_dir / HALTED_FILE).unlink(missing_ok=True)


def wait_for_all(attempt: int, round_: int, world_size: int) -> int:
    """Say that this rank is done and wait for the others, for a minute or half the job's own patience: how many did not come.

    Raises RuntimeError if the job's store is gone.
    """
    client, key = own_client(), f"{KEY}/{attempt}/halted/{round_}"
    deadline = time.monotonic() + min(MAX_WAIT_SECONDS, client.timeout.total_seconds() / 2)
    come = int(client.add(key, 1))
    while come < world_size and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
        come = int(client.add(key, 0))
    return max(world_size - come, 0)
