"""A training that the guard halted is final; any other failure is torchrun's to restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from sentinel.launch.halted import final, forget, was_halted
from sentinel.wire.names import HALTED_FILE


class Elastic:
    """What of an elastic agent counts here."""

    _remaining_restarts = 3


@pytest.mark.parametrize(
    ("state", "marked", "left"),
    [
        (WorkerState.FAILED, True, 0),
        (WorkerState.UNHEALTHY, True, 0),
        (WorkerState.FAILED, False, 3),
        (WorkerState.HEALTHY, True, 3),
        (WorkerState.SUCCEEDED, True, 3),
    ],
)
def test_only_a_halted_failure_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: WorkerState, marked: bool, left: int
) -> None:
    """Restarts are taken away from workers that failed after an agent left its mark, and from nobody else."""
    said = RunResult(state=state)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: said)
    if marked:
        (tmp_path / HALTED_FILE).write_text("{}")
    elastic: Any = Elastic()
    with final(tmp_path):
        assert LocalElasticAgent._monitor_workers(elastic, None) is said  # type: ignore[arg-type]
    assert elastic._remaining_restarts == left


def test_torchrun_is_as_it_was_afterwards(tmp_path: Path) -> None:
    """The change lasts only as long as the launch, even one that raises."""
    before = LocalElasticAgent._monitor_workers
    during = []

    def fail() -> None:
        with final(tmp_path):
            during.append(LocalElasticAgent._monitor_workers)
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fail()
    assert during[0] is not before
    assert LocalElasticAgent._monitor_workers is before


def test_an_old_mark_is_forgotten(tmp_path: Path) -> None:
    """A run directory that is used again does not end the new run."""
    (tmp_path / HALTED_FILE).write_text("{}")
    assert was_halted(tmp_path)
    forget(tmp_path)
    forget(tmp_path)
    assert not was_halted(tmp_path)
