"""The reports of a round joined: repeats, order, who is missing."""

from __future__ import annotations

import random

import msgspec
import pytest
from service.incidents.rounds import ACTIVATION, BUCKET, DERIVED, SCALAR, Round

from sentinel.incidents.window import RoundWindow, role_of
from sentinel.wire.messages import ClosedBy, Phase, Role


def test_repeats_change_nothing() -> None:
    """Reports are delivered at least once; the second delivery adds no evidence and no closing."""
    told = Round(2).loss(1).nan_gradient(1)
    once, twice = told.window(), told.window()
    for report in told.joined():
        twice.add(report, 5.0)
    assert (once.evidence, once.closed) == (twice.evidence, twice.closed)


def test_the_first_delivery_of_a_record_wins() -> None:
    """A second, different record of the same rank does not replace what was judged on."""
    told = Round(1)
    window, (first,) = told.window(), told.closings()
    window.add(msgspec.structs.replace(first, step=99), 1.0)
    assert window.closed[0].step == 0


def test_evidence_is_read_by_rank_and_order_however_it_came() -> None:
    """Order of arrival does not matter."""
    told = Round(3).loss(2, 0).nan_gradient(2, 0)
    shuffled = told.evidence()
    random.Random(7).shuffle(shuffled)  # seed 7
    window = RoundWindow(0, 0, opened_at=0.0)
    for evidence in shuffled:
        window.add(evidence, 0.0)
    seen = [(e.rank, e.order) for e in window.evidence]
    assert seen == sorted(seen)
    assert [e.phase for e in window.of_rank(2)] == [Phase.LOSS, Phase.WIRE, Phase.REDUCED]


def test_a_rank_that_did_not_close_is_missing() -> None:
    """Only expected ranks count."""
    window = Round(3).unclosed(1, 2).window()
    assert window.incomplete((0, 1)) == (1,)
    assert window.incomplete(()) == ()


def test_a_rank_whose_evidence_is_not_all_here_is_missing() -> None:
    """The closing record says how much evidence there is; a piece lost on the way is noticed."""
    told = Round(2).loss(1).raw(1)
    assert told.window().incomplete((0, 1)) == ()
    assert told.lost(1, 0).window().incomplete((0, 1)) == (1,)


def test_a_repeat_does_not_stand_in_for_lost_evidence() -> None:
    """Two deliveries of one piece are one piece."""
    told = Round(1).loss(0).raw(0).lost(0, 1)
    window = told.window()
    for evidence in told.evidence():
        window.add(evidence, 0.0)
    assert window.incomplete((0,)) == (0,)


def test_every_report_touches_the_window() -> None:
    """The deadline counts from the last report."""
    told = Round(1).raw(0)
    window = RoundWindow(0, 0, opened_at=1.0)
    for now, report in enumerate(told.joined(), start=5):
        window.add(report, float(now))
    assert (window.opened_at, window.touched_at) == (1.0, 6.0)


@pytest.mark.parametrize(
    ("told", "asked", "expected"),
    [
        (Round(2, 9).closed(step=4), (), 4),
        (Round(2, 9).closed(step=4).unclosed(0), (0,), 4),
        (Round(2, 9, step=7).raw(1).unclosed(0, 1), (1,), 7),
        (Round(2, 9).unclosed(0, 1), (), 9),
    ],
    ids=["any rank's record", "the named rank's record is missing", "evidence alone", "nothing but the round's number"],
)
def test_step_is_the_best_clock_there_is(told: Round, asked: tuple[int, ...], expected: int) -> None:
    """The named ranks' records first, then any record, then evidence, then the round's own number."""
    assert told.window().step(asked) == expected


def test_step_prefers_the_named_ranks() -> None:
    """Ranks may count steps differently; the suspect's own clock dates its fault."""
    window = Round(2, 9, step=3).closed(ClosedBy.OPTIMIZER, 1, step=8).window()
    assert (window.step((1,)), window.step()) == (8, 3)


def test_gradient_evidence_is_about_gradients() -> None:
    """Activations and scalars are evidence, never a gradient's; losses are none either."""
    told = Round(1).loss(0).raw(0).wire(0, of=ACTIVATION).wire(0, of=SCALAR).wire(0, of=BUCKET).reduced(0, of=DERIVED)
    assert [role_of(e) for e in told.window().gradient_evidence()] == [Role.GRADIENT, Role.GRADIENT, Role.DERIVED]


def test_ranks_of_phases_are_ascending_and_named_once() -> None:
    """However often and in which order a rank saw it."""
    window = Round(3).loss(2, 0).raw(2).window()
    assert window.ranks_of(Phase.LOSS, Phase.RAW) == (0, 2)
    assert window.ranks_of(Phase.INIT) == ()


def test_a_window_without_evidence_says_so() -> None:
    """Closing records alone are a healthy round."""
    assert not Round(2).window().has_evidence
    assert Round(2).raw(1).window().has_evidence
