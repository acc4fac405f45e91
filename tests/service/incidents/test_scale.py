"""The work a report costs does not grow with the world, in ordinary rounds and in the worst ones.

The promise is 16,384 ranks, a round a second, on a third of one core: about 20 µs a report.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

from service.incidents.rounds import World

from sentinel.wire.messages import Report

LARGE = 16_384
CALLS = 100


def feed_within(calls: int, world: World, reports: Iterable[Report]) -> None:
    """Feed one by one; fails once the core has made more than ``calls`` calls a report, counted exactly by the interpreter.

    Calls, not seconds: a test must not depend on how busy the machine is. Seconds are scripts/bench's business.
    """
    made = list(reports)
    counted = 0
    budget = calls * len(made)

    def count(_frame: FrameType, event: str, _value: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    for number, report in enumerate(made, start=1):
        sys.setprofile(count)
        try:
            world.feed(report)
        finally:
            sys.setprofile(None)
        assert counted <= budget, f"{counted} calls for {number} of {len(made)} reports"
    print(f"{counted / len(made):.1f} calls a report")


def large(ranks: int) -> World:
    """A world whose ranks have all said hello."""
    world = World(ranks)
    world.hello()
    return world


def test_a_healthy_round_of_16384_ranks() -> None:
    """One record of each rank costs a bounded number of calls."""
    world = large(LARGE)
    feed_within(CALLS, world, world.round().closings())
    assert world.tracker.counts.rounds_checked == 1


def test_the_ordinary_fault_of_8192_ranks() -> None:
    """One rank's NaN is seen by every rank; judging it is linear in the ranks."""
    world = large(LARGE // 2)
    feed_within(CALLS, world, world.round().nan_gradient(1).reports())
    assert world.incident.suspect_ranks == (1,)


def test_the_worst_fault_of_2048_ranks() -> None:
    """Every rank's own gradients are NaN."""
    world = large(LARGE // 8)
    feed_within(CALLS, world, world.round().nan_gradient(*range(LARGE // 8)).reports())
    assert len(world.incident.suspect_ranks) == LARGE // 8


def test_the_end_of_a_run_of_1024_ranks_with_one_straggler() -> None:
    """All but one have said goodbye and wait for it."""
    world = large(1024)
    told = world.round()
    world.feed(*told.closings(*range(1023)))
    feed_within(CALLS, world, (world.goodbye(rank, 0) for rank in range(1023)))


def test_lost_samples_do_not_slow_a_run_down() -> None:
    """Records of earlier rounds were lost, so their windows stay open; a healthy round beside them costs no more for it."""
    world = large(1024)
    for _ in range(250):
        world.feed(*world.round().closings(0))
    feed_within(CALLS, world, world.round().closings())
