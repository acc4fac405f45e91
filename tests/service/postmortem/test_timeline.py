"""An incident told in time."""

from __future__ import annotations

import json

import past
import story

from sentinel.incidents.events import Event, Expect, Received, RunEnded
from sentinel.postmortem.timeline import MOMENTS_SHOWN, timeline, timeline_records, timeline_text
from sentinel.wire.messages import Disabled, Goodbye, PartWritten, Phase

OPENED = story.STARTED + 5


def logged(events: list[Event], start: float = OPENED - 20) -> list[tuple[float, Event]]:
    """Events a second apart."""
    return [(start + n, event) for n, event in enumerate(events)]


def words(events: list[Event]) -> list[str]:
    """What the timeline says of ``events``."""
    return [moment.what for moment in timeline(story.incident(), logged(events))]


def test_story_is_told_in_order() -> None:
    """Healthy rounds, the loss, the reduction, the incident and the end come in the order in which they were heard."""
    told = [m.what for m in timeline(story.incident(), [(OPENED - 1 + n / 100, e) for n, e in enumerate(past.log())])]
    places = [
        next(i for i, what in enumerate(told) if wanted in what)
        for wanted in (
            "healthy",
            "loss is nan",
            "gave a reduction nonfinite",
            "got nonfinite gradients back",
            "run ended",
        )
    ]
    assert places == sorted(places)
    assert any(what.startswith("incident a0-r000007-01 opened") for what in told)


def test_like_moments_of_many_ranks_are_one_line() -> None:
    """A thousand ranks that receive the same are one moment, at the time of the first."""
    events: list[Event] = [Received(past.evidence(rank, Phase.REDUCED)) for rank in range(1000)]
    received = [m for m in timeline(story.incident(), logged(events, OPENED)) if "got nonfinite" in m.what]
    assert [(m.at, len(m.ranks)) for m in received] == [(OPENED, 1000)]


def test_rounds_far_from_the_incident_are_left_out() -> None:
    """Only two rounds before the origin and one after the last are told; another attempt is not."""
    events: list[Event] = [Received(past.closed(0, n)) for n in range(100)]
    events += [Received(past.evidence(0, Phase.WIRE, attempt=2)), Expect(2), RunEnded()]
    rounds = {m.round for m in timeline(story.incident(), logged(events))}
    assert rounds == {5, 6, 7, 8, None}


def test_what_ranks_say_besides_is_told() -> None:
    """Parts written and failed, an agent that switched itself off, and how processes ended are moments too."""
    part = {"attempt": 0, "rank": 1, "round": 7, "step": 7, "node": 0, "directory": "/x", "bytes": 1, "seconds": 0.1}
    told = words(
        [
            Received(PartWritten(**part)),
            Received(PartWritten(**{**part, "rank": 0, "error": "disk full"})),
            Received(Disabled(0, 1, "too many faults")),
            Received(Goodbye(0, 1, 8, False, "ValueError")),
        ]
    )
    assert "wrote its part of the bundle" in told
    assert "could not write its part: disk full" in told
    assert "agent switched itself off: too many faults" in told
    assert "ended after an error: ValueError" in told


def test_text_is_bounded_and_counts_from_the_opening() -> None:
    """The table shows at most eighty moments, with seconds before and after the incident was opened."""
    events: list[Event] = [Received(past.evidence(0, Phase.WIRE, note=str(n))) for n in range(200)]
    incident = story.incident()
    text = timeline_text(incident, timeline(incident, logged(events)))
    assert len(text.splitlines()) == MOMENTS_SHOWN + 2
    assert "-20.000" in text
    assert "… and 121 more" in text


def test_hostile_notes_stay_on_their_line() -> None:
    """Control characters of a training process do not reach the terminal."""
    incident = story.incident()
    events: list[Event] = [Received(past.evidence(0, Phase.WIRE, note="\x1b[2J\nowned"))]
    text = timeline_text(incident, timeline(incident, logged(events)))
    assert "\x1b" not in text
    assert len(text.splitlines()) == 3


def test_records_are_json() -> None:
    """Each moment has its time in RFC 3339 and its seconds from the opening."""
    incident = story.incident()
    records = timeline_records(
        incident, timeline(incident, logged([Received(past.evidence(1, Phase.WIRE))], OPENED + 1))
    )
    first, second = (json.loads(record.model_dump_json()) for record in records)
    assert first["seconds"] == 0.0
    assert second["seconds"] == 1.0
    assert second["at"].endswith("Z")
    assert second["ranks"] == [1]
