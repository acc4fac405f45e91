"""The quick look: only at what it is certain of, and with the same result as the long way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched import Watched

from sentinel.wire.messages import Phase
from sentinel_agent import buckets, reductions
from sentinel_agent.check import NORM_FROM, check_one
from sentinel_agent.taps import wire

LARGE = NORM_FROM + 1
NAN = torch.ones(LARGE)
NAN[7] = float("nan")


@pytest.mark.parametrize(
    ("op", "given"),
    [
        ("allreduce_", [torch.ones(NORM_FROM)]),
        ("allreduce_", [NAN]),
        ("allreduce_", [torch.zeros(LARGE)]),
        ("allreduce_", [torch.full((LARGE,), 3e38)]),
        ("allreduce_", [torch.ones(LARGE), torch.ones(LARGE)]),
        ("allreduce_", [torch.ones(LARGE, dtype=torch.float16)]),
        ("allreduce_", [torch.ones(LARGE, dtype=torch.int64)]),
        ("allreduce_", [nn.Parameter(torch.ones(LARGE))]),
        ("allreduce_", [torch.ones(LARGE).to_sparse()]),
        ("allreduce_", []),
        ("allreduce_", torch.ones(LARGE)),
        ("reduce_scatter_", [torch.ones(LARGE)]),
    ],
    ids=[
        *(
            "small",
            "nan",
            "zeros",
            "overflowing norm",
            "two",
            "half",
            "integers",
            "parameter",
            "sparse",
            "none",
            "bare",
        ),
        "another op",
    ],
)
def test_whatever_is_not_certain_goes_the_long_way(op: str, given: Any) -> None:
    """Small, nonfinite, unusual or several tensors, and other ops, are left to the careful check."""
    assert buckets.quick_look(wire.reader(op), (given,), {}) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_finds_what_the_long_way_finds(dtype: torch.dtype) -> None:
    """A large finite bucket is found as the careful check finds it."""
    tensor = torch.randn(LARGE, dtype=dtype)
    bucket = buckets.quick_look(wire.reader("allreduce_"), ([tensor],), {})
    assert bucket is not None
    assert bucket.found == check_one(tensor)


def trained(watched: Watched, *, nan_in_round: int = -1) -> list[str]:
    """Four rounds of a DDP model with large buckets; what is told of each that does not depend on the round's number."""
    before = len(watched.rounds)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200)), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(4):
        optimizer.zero_grad()
        rows = torch.randn(4, 200)
        if number == nan_in_round:
            rows[0, 0] = float("nan")
        model(rows).square().mean().backward()
        optimizer.step()
    rounds = watched.rounds[before:]
    synced = [
        [(s.group, s.size, s.collectives, s.identity, f"{s.norm:.4g}", s.foreign) for s in r.sync] for r in rounds
    ]
    return [
        repr((r.evidence, r.loss, r.gradient_absmax, r.unreduced, one)) for r, one in zip(rounds, synced, strict=True)
    ]


@pytest.mark.parametrize("nan_in_round", [-1, 2])
def test_rounds_are_told_as_the_long_way_tells_them(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, nan_in_round: int
) -> None:
    """What a rank tells of its rounds, and what it latches, does not depend on which way its buckets went."""
    quick = trained(watched, nan_in_round=nan_in_round)
    seen = [(e.phase, e.parameters) for e in watched.evidence(Phase.WIRE, Phase.REDUCED)]
    monkeypatch.setattr(reductions, "quick_look", lambda *_: None)
    slow = trained(watched, nan_in_round=nan_in_round)
    assert slow == quick
    assert [(e.phase, e.parameters) for e in watched.evidence(Phase.WIRE, Phase.REDUCED)] == seen + seen
    assert bool(seen) is (nan_in_round >= 0)


def test_buckets_are_really_looked_at_quickly(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP's own buckets take the quick way: else all of this is for nothing."""
    looked: list[bool] = []
    original = buckets.quick_look

    def spy(*args: Any) -> Any:
        looked.append((bucket := original(*args)) is not None)
        return bucket

    monkeypatch.setattr(reductions, "quick_look", spy)
    trained(watched)
    assert sum(looked) >= 6  # the first of all is where the call stack is learnt
    assert not watched.agent.ledger.reductions._unbooked
