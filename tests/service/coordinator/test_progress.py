"""Progress: what the last rounds of a run keep for curves and the heat map, within bounds."""

from __future__ import annotations

import math

import pytest
from relay_client import evidence

from sentinel.coordinator.progress import KEPT_ROUNDS, Progress, RankSaw
from sentinel.wire.messages import Check, ClosedBy, Collective, Evidence, GroupSync, Phase, Role, RoundClosed


def closed(rank: int, round_: int, attempt: int = 0, **fields: object) -> RoundClosed:
    """One rank's record of a round that ended ``round_`` half seconds after the start."""
    at = 100.0 + 0.5 * round_
    return RoundClosed(attempt, rank, round_, round_, ClosedBy.OPTIMIZER, at, 0, 1, **fields)  # type: ignore[arg-type]


def progress_of(world_size: int, rounds: int, **fields: object) -> Progress:
    """A healthy run."""
    progress = Progress()
    for round_ in range(rounds):
        for rank in range(world_size):
            progress.note(closed(rank, round_, **fields), world_size)
    return progress


def test_a_round_sums_up_its_ranks() -> None:
    """Loss over the ranks, scale, magnitude and norm are those that the ranks told; a nonfinite loss is counted apart."""
    progress = Progress()
    sync = (GroupSync("0", (), 2, 1, 7, 8, norm=3.0), GroupSync("1", (0, 1), 2, 1, 7, 8, norm=4.0))
    progress.note(closed(0, 0, loss=1.0, loss_scale=8.0, gradient_absmax=2.0, sync=sync), 3)
    progress.note(closed(1, 0, loss=3.0, gradient_absmax=6.0), 3)
    assert progress.newest is None
    progress.note(closed(2, 0, loss=math.nan), 3)
    row = progress.newest
    assert row is not None
    assert (row.loss_min, row.loss_mean, row.loss_max, row.loss_nonfinite) == (1.0, 2.0, 3.0, 1)
    assert (row.loss_scale, row.gradient_absmax, row.gradient_norm) == (8.0, 6.0, 5.0)
    assert row.headroom is None


def test_headroom_is_told_where_float16_is_reduced() -> None:
    """Two ranks with gradients up to 2^13 each could be four times larger before their sum overflows."""
    progress = progress_of(2, 1, gradient_absmax=1e9, float16_absmax=8192.0)
    assert progress.newest is not None
    assert progress.newest.headroom == pytest.approx(4.0, abs=0.01)
    for rank in range(2):  # a round without a float16 reduction has none to lose
        progress.note(closed(rank, 1, gradient_absmax=16384.0), 2)
    assert progress.newest.headroom is None


def test_a_norm_that_nobody_could_take_is_not_zero() -> None:
    """Where a hook's results are out of the agent's reach it tells 0 beside gradients that are not; all-zero gradients are 0."""
    sync = (GroupSync("0", (), 2, 1, 7, 8),)
    for absmax, norm in ((3.0, None), (0.0, 0.0)):
        newest = progress_of(2, 1, gradient_absmax=absmax, sync=sync).newest
        assert newest is not None
        assert newest.gradient_norm == norm


def test_a_rank_shows_the_worst_that_it_saw() -> None:
    """Its own nonfinite gradient outranks what came to it, which outranks a skip, in whatever order they are reported."""
    progress = Progress()
    progress.note(closed(0, 0), 4)
    progress.note(evidence(0), 4)
    found = Check(10, 3, 0, 1.0)
    seen = Collective("0", (), 0, "allreduce_", "sum", "float32", Role.GRADIENT, found, found)
    progress.note(Evidence(0, 1, 0, 0, 0, Phase.REDUCED, 1.0, found, (), 0, seen), 4)
    progress.note(closed(1, 0), 4)
    progress.note(closed(2, 0, skipped=True), 4)
    [row] = progress.rows()
    assert list(row.saw()) == [RankSaw.OWN, RankSaw.RECEIVED, RankSaw.SKIPPED, RankSaw.NOTHING]
    assert progress.rounds_skipped == 1


def test_rounds_are_timed_from_end_to_end() -> None:
    """Nine of ten rounds have one before them; a new attempt starts anew, and a clock that jumps back counts nothing."""
    progress = progress_of(2, 10)
    assert (progress.rounds_timed, progress.round_seconds) == (9, pytest.approx(4.5))
    for rank in range(2):
        progress.note(closed(rank, 0, attempt=1), 2)
    assert progress.rounds_timed == 9


def test_the_ring_is_bounded_and_packs_what_is_settled() -> None:
    """Of many rounds at 16,384 ranks the last ones are kept, and settled ones take a few hundred bytes each."""
    world = 16_384
    progress = Progress()
    for round_ in range(KEPT_ROUNDS + 40):
        for rank in (0, 77, world - 1):
            progress.note(closed(rank, round_), world)
    rows = progress.rows()
    assert len(rows) == KEPT_ROUNDS
    assert rows[-1].round == KEPT_ROUNDS + 39
    assert sum(len(row.ranks) for row in rows) < 17 * world + KEPT_ROUNDS * 200
    assert rows[0].saw()[77] == RankSaw.CLEAN
    assert progress.newest is not None


def test_a_late_report_still_reaches_its_settled_round() -> None:
    """Evidence that was spooled for long marks its rank in a packed round, and begins no row once the round has left."""
    progress = progress_of(2, 40)
    progress.note(evidence(1, 3), 2)
    assert progress.rows()[3].saw()[1] == RankSaw.OWN
    progress = progress_of(2, KEPT_ROUNDS + 10)
    progress.note(evidence(1, 3), 2)
    assert progress.rows()[0].round == 10


def test_rows_are_copies() -> None:
    """What a page reads does not change under it."""
    progress = progress_of(2, 1)
    [row] = progress.rows()
    progress.note(evidence(1, 0), 2)
    assert row.saw()[1] == RankSaw.CLEAN


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 5e-324, 1.7e308])
def test_no_number_of_a_peer_stops_it(value: float) -> None:
    """Infinite, tiny and huge values of a peer are taken in, and every derived number can be read."""
    sync = (GroupSync("0", (), 2, 1, 7, 8, norm=value, audited_dtype="float16"),)
    told = {"loss": value, "loss_scale": value, "gradient_absmax": value, "float16_absmax": value, "sync": sync}
    progress = progress_of(2, 3, **told)
    row = progress.newest
    assert row is not None
    assert row.loss_mean is not None
    assert row.headroom is None or isinstance(row.headroom, float)
