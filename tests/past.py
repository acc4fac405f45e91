"""The event log of the story in ``story.py``: two (or many) ranks train, and rank 1 goes nonfinite in round 7."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sentinel.incidents.events import Event, Expect, Received, RunEnded
from sentinel.wire.messages import Check, ClosedBy, Evidence, GroupSync, Phase, RoundClosed

FAULT = 7


def closed(rank: int, round_: int, **changes: object) -> RoundClosed:
    """One rank's healthy round."""
    fields: dict[str, object] = {
        "attempt": 0,
        "rank": rank,
        "round": round_,
        "step": round_,
        "closed_by": ClosedBy.OPTIMIZER,
        "at": float(round_),
        "evidence": 0,
        "checks": 2,
        "loss": 1.0 / (1 + round_) + 0.01 * rank,
        "loss_scale": 1024.0,
        "gradient_absmax": 10.0 ** (rank % 3) / (1 + round_),
        "sync": (GroupSync("0", (), 2, 1, 1, 1, norm=3.0), GroupSync("1", (), 2, 1, 1, 1, norm=4.0)),
    }
    return RoundClosed(**{**fields, **changes})  # type: ignore[arg-type]


def evidence(rank: int, phase: Phase, **changes: object) -> Evidence:
    """Something nonfinite in the faulty round."""
    fields: dict[str, object] = {
        "attempt": 0,
        "rank": rank,
        "round": FAULT,
        "step": FAULT,
        "order": 0,
        "phase": phase,
        "at": 7.0,
        "check": Check(10, 4, 0, 0.0),
    }
    return Evidence(**{**fields, **changes})  # type: ignore[arg-type]


def log(world_size: int = 2, rounds: int = 12, guilty: int = 1) -> Iterator[Event]:
    """Every rank's rounds; rank ``guilty`` makes the fault, the others receive it."""
    yield Expect(world_size)
    for round_ in range(rounds):
        for rank in sorted(range(world_size), key=lambda r: r != guilty):
            if round_ != FAULT:
                yield Received(closed(rank, round_))
                continue
            if rank == guilty:
                yield Received(evidence(rank, Phase.LOSS, value=math.nan))
                yield Received(evidence(rank, Phase.WIRE))
            yield Received(evidence(rank, Phase.REDUCED))
            loss = math.nan if rank == guilty else 0.5
            yield Received(closed(rank, round_, evidence=1, loss=loss, skipped=True, gradient_absmax=0.0))
    yield RunEnded()
