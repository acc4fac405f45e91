"""What the launcher does about a training that the guard halted: it is final, however many restarts are left.

Owns the reading of the agents' mark, and the one change to torchrun's elastic agent: a worker group that failed after the mark was
left is not started again. Restarted, it would meet the same gradients, or hide that it did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from sentinel.wire.names import HALTED_FILE

HALTED = 93
"""Exit code of a launcher whose training the guard halted: do not requeue."""


def was_halted(run_dir: Path) -> bool:
    """Did an agent of this node leave the mark?"""
    return (run_dir / HALTED_FILE).exists()


def forget(run_dir: Path) -> None:
    """Remove the mark of an earlier run in the same directory. Raises OSError."""
    (run_dir / HALTED_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def final(run_dir: Path) -> Iterator[None]:
    """Inside, torchrun does not restart workers that failed after the guard halted them."""
    original = LocalElasticAgent._monitor_workers

    def monitor(agent: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(agent, *args, **kwargs)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY) and was_halted(run_dir):
            agent._remaining_restarts = 0
        return result

    LocalElasticAgent._monitor_workers = monitor  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalElasticAgent._monitor_workers = original  # type: ignore[method-assign]
