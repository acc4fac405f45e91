"""From the event log to the table of ranks and rounds."""

from __future__ import annotations

import math

import past
import story

from sentinel.incidents.events import Received
from sentinel.postmortem.report.rounds import AFTER, BEFORE, RANKS_SHOWN, CellState, history
from sentinel.wire.messages import ClosedBy, Phase


def test_who_made_it_and_who_received_it() -> None:
    """In the faulty round the guilty rank's cell is its own fault, the others only received it."""
    found = history(past.log(), story.incident())
    assert found is not None
    assert found.state(1, 7) is CellState.OWN
    assert found.state(0, 7) is CellState.RECEIVED
    assert found.state(1, 6) is found.state(0, 8) is CellState.HEALTHY


def test_nonfinite_sums_are_not_shown_as_zero() -> None:
    """Where the contribution was nonfinite its magnitude is NaN, though the report's finite part is 0."""
    found = history(past.log(), story.incident())
    assert found is not None
    assert math.isnan(found.cells[1, 7].absmax or 0.0)
    assert math.isnan(found.cells[0, 7].norm or 0.0)
    assert found.cells[0, 6].norm == 5.0


def test_only_rounds_near_the_fault_are_kept() -> None:
    """A log of any length gives a table of bounded width, of one attempt."""
    incident = story.incident(round=500, step=500)
    long = [Received(past.closed(rank, n)) for n in range(1000) for rank in range(2)]
    other = [Received(past.closed(0, 490, attempt=1, loss=99.0))]
    found = history([*long, *other], incident)
    assert found is not None
    assert (found.first, found.last) == (500 - BEFORE, 500 + AFTER)
    assert found.cells[0, 490].loss != 99.0


def test_rank_without_a_report_is_absent() -> None:
    """A rank that the run should have and that said nothing has cells without a report."""
    found = history(past.log(), story.incident(world_size=3))
    assert found is not None
    assert found.ranks == (0, 1, 2)
    assert found.state(2, 7) is CellState.ABSENT


def test_skipped_step_with_finite_values_is_named() -> None:
    """A step that a framework left out shows as skipped."""
    skipped = past.closed(0, 3, skipped=True, closed_by=ClosedBy.FRAMEWORK_SKIPPED)
    found = history([Received(skipped)], story.incident())
    assert found is not None
    assert found.state(0, 3) is CellState.SKIPPED


def test_many_ranks_keep_the_telling_ones() -> None:
    """Of 4,000 ranks the suspects and those with faults of their own are shown, and no more than fit."""
    incident = story.incident(world_size=4000, suspect_ranks=(3711,))
    events = [
        *past.log(world_size=4),
        Received(past.evidence(3711, Phase.WIRE)),
        Received(past.evidence(2000, Phase.RAW)),
    ]
    found = history(events, incident)
    assert found is not None
    assert len(found.ranks) == RANKS_SHOWN
    assert 3711 in found.ranks


def test_log_without_the_rounds_gives_no_table() -> None:
    """An empty log, or one of another attempt, gives nothing to draw."""
    assert history([], story.incident()) is None
    assert history(past.log(), story.incident(attempt=3)) is None
