"""What a person asks of the core: to keep a word on an incident, and to plan a dump."""

from __future__ import annotations

from relay_client import closed, fault_of, hello

from sentinel.incidents.events import Acknowledged, DumpAsked, Received, RequestParts, RunEnded, SaveIncident
from sentinel.incidents.tracker import Tracker
from sentinel.wire.messages import Report


def tracked(*, ended: bool = False) -> Tracker:
    """A tracker that was told of two ranks, a fault of rank 1 in round 0, and healthy rounds up to 5."""
    tracker = Tracker("run")
    reports: list[Report] = [hello(0), hello(1), *fault_of(1), closed(0)]
    reports += [closed(rank, round_) for round_ in range(1, 6) for rank in (0, 1)]
    for report in reports:
        tracker.handle(Received(report), 1.0)
    if ended:
        tracker.handle(RunEnded(), 2.0)
    return tracker


def test_a_word_is_kept_and_changes_no_verdict() -> None:
    """Who, when and what is said is saved; everything else of the incident stays."""
    tracker = tracked()
    (known,) = tracker.incidents.values()
    (saved,) = tracker.handle(Acknowledged(known.id, "ada", "bad scan, removed"), 1000.0)
    assert isinstance(saved, SaveIncident)
    said = saved.incident
    assert (said.acknowledged_by, said.acknowledged_note) == ("ada", "bad scan, removed")
    assert said.acknowledged_at is not None
    assert said.acknowledged_at.timestamp() == 1000.0
    changed = {"acknowledged_at", "acknowledged_by", "acknowledged_note", "updated_at"}
    assert said.model_dump(exclude=changed) == known.model_dump(exclude=changed)
    assert tracker.incidents[known.id] == said


def test_a_word_on_nothing_changes_nothing() -> None:
    """An id that no incident has is no error and no command."""
    assert tracked().handle(Acknowledged("absent", "ada"), 1000.0) == []


def test_a_dump_is_planned_ahead_of_every_rank() -> None:
    """The round is one that no rank has closed, and every rank that is there is asked."""
    tracker = tracked()
    newest = max(state.last_round for state in tracker.ranks.values())
    (request,) = tracker.handle(DumpAsked(3), 1000.0)
    assert request == RequestParts(0, newest + 3, (0, 1))


def test_no_dump_is_planned_where_nobody_is_left() -> None:
    """A run without ranks, or whose ranks have left, has nobody to ask."""
    assert Tracker("run").handle(DumpAsked(3), 1.0) == []
    assert tracked(ended=True).handle(DumpAsked(3), 1000.0) == []
