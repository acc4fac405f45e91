"""Large worlds are handled in reasonable time, in ordinary rounds and in the worst ones.

The promise is 16,384 ranks, a round a second, on a third of one core; the budgets here leave slow machines three times that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from service.incidents.rounds import World

from sentinel.wire.messages import Report

LARGE = 16_384


def feed_within(seconds: float, world: World, reports: Iterable[Report]) -> float:
    """Feed one by one and return the CPU time spent; fails once it exceeds ``seconds``, so that a slow core costs no more."""
    started, count = time.process_time(), 0
    for count, report in enumerate(reports, start=1):
        world.feed(report)
        spent = time.process_time() - started
        assert spent < seconds, f"{spent:.2f} s of CPU for {count} reports"
    print(f"{count} reports in {time.process_time() - started:.2f} s of CPU")
    return time.process_time() - started


def large(ranks: int) -> World:
    """A world whose ranks have all said hello."""
    world = World(ranks)
    world.hello()
    return world


def test_a_healthy_round_of_16384_ranks() -> None:
    """One record of each rank takes under a second."""
    world = large(LARGE)
    feed_within(1.0, world, world.round().closings())
    assert world.tracker.counts.rounds_checked == 1


@pytest.mark.xfail(strict=True, reason="window._is_whole walks all evidence for each rank")
def test_the_ordinary_fault_of_8192_ranks() -> None:
    """One rank's NaN is seen by every rank; the round stays within half of the large world's second."""
    world = large(LARGE // 2)
    feed_within(0.5, world, world.round().nan_gradient(1).reports())
    assert world.incident.suspect_ranks == (1,)


@pytest.mark.xfail(
    strict=True, reason="window.of_rank sorts and walks all evidence, and raw_origins asks it of each rank"
)
def test_the_worst_fault_of_2048_ranks() -> None:
    """Every rank's own gradients are NaN."""
    world = large(LARGE // 8)
    feed_within(0.2, world, world.round().nan_gradient(*range(LARGE // 8)).reports())
    assert len(world.incident.suspect_ranks) == LARGE // 8


@pytest.mark.xfail(strict=True, reason="every event asks every goodbye, and every goodbye asks every rank")
def test_the_end_of_a_run_of_1024_ranks_with_one_straggler() -> None:
    """All but one have said goodbye and wait for it."""
    world = large(1024)
    told = world.round()
    world.feed(*told.closings(*range(1023)))
    feed_within(0.25, world, (world.goodbye(rank, 0) for rank in range(1023)))


def test_lost_samples_do_not_slow_a_run_down() -> None:
    """Records of earlier rounds were lost, so their windows stay open; a healthy round beside them costs no more for it."""
    world = large(1024)
    for _ in range(250):
        world.feed(*world.round().closings(0))
    feed_within(0.25, world, world.round().closings())
