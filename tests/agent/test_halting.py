"""Before a guard that halts raises: the mark is left, and the other ranks are waited for, but not for ever."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched import Watched

from sentinel.wire.messages import Guarded
from sentinel.wire.names import HALTED_FILE
from sentinel_agent.errors import Health
from sentinel_agent.halting import NonFiniteGradientError, halt, wait_for_all


@pytest.fixture
def store(group: None, monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The job's store, shared by threads that stand for ranks; its patience is two seconds."""
    shared = dist.HashStore()
    shared.set_timeout(timedelta(seconds=2))
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: shared)
    return shared


def test_ranks_wait_for_each_other(store: dist.Store) -> None:
    """No rank goes on before the last one has said that it is done, and then none is missing."""
    missing: Counter[int] = Counter()
    ranks = [threading.Thread(target=lambda: missing.update([wait_for_all(0, 7, 3)])) for _ in range(2)]
    for rank in ranks:
        rank.start()
    ranks[0].join(0.2)
    assert ranks[0].is_alive()
    missing.update([wait_for_all(0, 7, 3)])
    for rank in ranks:
        rank.join(5)
    assert missing == {0: 3}


def test_a_rank_that_never_comes_is_given_up(store: dist.Store) -> None:
    """Half the job's own patience is the limit; how many are missing is known."""
    assert wait_for_all(0, 7, 3) == 2


def test_the_mark_says_which_round(store: dist.Store, tmp_path: Path) -> None:
    """The launcher finds the round and step."""
    health = Health(0, lambda _reason: None)
    assert halt(tmp_path, 0, 0, 1, (9, 7), health) == 0
    assert json.loads((tmp_path / HALTED_FILE).read_text()) == {"rank": 0, "round": 9, "step": 7}
    assert not health.faults


def test_training_that_goes_on_takes_the_mark_away(watch: Callable[..., Watched], tmp_path: Path) -> None:
    """Who catches the error and trains on is no longer halted: the mark is there after the raise, and gone a round later."""
    watched = watch(run_dir=tmp_path, guard="halt")
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for rows in (torch.full((2, 3), float("nan")), torch.ones(2, 3)):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        if rows.isnan().any():
            with pytest.raises(NonFiniteGradientError, match="gradients of step 0"):
                optimizer.step()
            assert (tmp_path / HALTED_FILE).exists()
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        else:
            optimizer.step()
    assert not (tmp_path / HALTED_FILE).exists()
    assert [r.guarded for r in watched.rounds] == [Guarded.HALTED, Guarded.NO]


def test_a_mark_that_cannot_be_left_is_counted(store: dist.Store, tmp_path: Path) -> None:
    """A run directory that is gone costs the mark, not the halt."""
    health = Health(0, lambda _reason: None)
    assert halt(tmp_path / "gone", 0, 0, 1, (9, 7), health) == 0
    assert health.faults == {"halt_mark:FileNotFoundError": 1}


@pytest.mark.parametrize(
    ("missing", "text"),
    [(0, "no rank is still writing"), (2, "2 ranks did not come"), (None, "is not known")],
)
def test_the_error_says_what_is_on_disk(missing: int | None, text: str) -> None:
    """Whoever reads the traceback knows the step and whether the evidence is whole."""
    error = NonFiniteGradientError(7, missing)
    assert error.step == 7
    assert text in str(error)
    assert "step 7" in str(error)
