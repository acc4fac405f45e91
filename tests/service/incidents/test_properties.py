"""What holds for every order, repeat and loss of reports: the same verdict, or an honest one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from service.incidents.rounds import (
    ACTIVATION,
    DERIVED,
    FINITE,
    GATHERED,
    HALF_BUCKET,
    INF,
    SHARD,
    T0,
    Round,
    World,
    collective,
)

from sentinel.incidents.events import Event, Expect, Received, RunEnded, Tick
from sentinel.incidents.model import Attribution, Incident
from sentinel.incidents.tracker import JUDGE_SECONDS, Tracker
from sentinel.wire.messages import (
    UNREDUCED,
    Check,
    ClosedBy,
    Collective,
    Counted,
    Disabled,
    Evidence,
    Goodbye,
    GroupSync,
    Hello,
    NodeEnded,
    PartWritten,
    Phase,
    Report,
    Role,
    RoundClosed,
    Weights,
)

# A failing example is printed whole, with the blob that reproduces it: that is the seed.
settings.register_profile("core", print_blob=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CORE = settings(settings.get_profile("core"), max_examples=60)


@dataclass(frozen=True)
class Story:
    """A faulty round of a known origin. ``tell`` adds it to a round; ``origins`` are the ranks that may be accused."""

    name: str
    size: int
    origins: tuple[int, ...]
    tell: Callable[[Round], Round] = field(compare=False)
    induced: bool = False

    def __repr__(self) -> str:
        """The name is enough in a falsifying example."""
        return f"<{self.name}>"

    def round(self) -> Round:
        """The story as round 3."""
        return self.tell(Round(self.size, 3))


LATER = collective(index=1)
PLAIN_STORIES = [
    Story("one rank raw", 2, (1,), lambda r: r.nan_gradient(1)),
    Story(
        "one rank loss and raw in two buckets", 3, (2,), lambda r: r.loss(2).nan_gradient(2).nan_gradient(2, of=LATER)
    ),
    Story("two of four raw", 4, (0, 3), lambda r: r.nan_gradient(0, 3)),
    Story("all raw", 3, (0, 1, 2), lambda r: r.loss().nan_gradient(0, 1, 2)),
    Story("loss alone", 3, (1,), lambda r: r.loss(1)),
    Story("raw before the collective, then exit", 2, (0,), lambda r: r.raw(0).saw(Phase.EXIT, 0).closed(ClosedBy.EXIT)),
    Story("weights at the start", 3, (0, 2), lambda r: r.saw(Phase.INIT, 0, 2)),
    Story(
        "cast", 3, (1,), lambda r: r.wire(1, of=HALF_BUCKET, found=INF, raw=FINITE).reduced(of=HALF_BUCKET, found=INF)
    ),
    Story("sum", 3, (), lambda r: r.reduced(of=HALF_BUCKET, found=INF, absmax=40_000.0), induced=True),
    Story("shard", 4, (2,), lambda r: r.wire(2, of=SHARD).reduced(0, of=SHARD)),
]
CHAINED_STORIES = [
    Story(
        "tensor parallel",
        3,
        (1,),
        lambda r: (
            r.wire(1, of=ACTIVATION, raw=None).reduced(of=ACTIVATION).raw(0, 1, 2).nan_gradient(0, 1, 2, of=LATER)
        ),
    ),
    Story(
        "compression",
        2,
        (0,),
        lambda r: (
            r.wire(0, of=HALF_BUCKET, found=INF, raw=FINITE)
            .reduced(of=HALF_BUCKET, found=INF)
            .wire(0, 1, of=DERIVED, raw=FINITE)
            .saw(Phase.APPLIED)
        ),
    ),
]
# Who received is known only from who gave: if that is lost, receivers are taken for origins (RULES.md says so).
GIVEN_STORIES = [
    Story("gathered", 3, (0,), lambda r: r.wire(0, of=GATHERED, raw=None).loss().nan_gradient(0, 1, 2, of=LATER)),
]
STORIES = PLAIN_STORIES + CHAINED_STORIES + GIVEN_STORIES


def verdict(incident: Incident) -> tuple[object, ...]:
    """What an incident says about the fault; not when and how often it was seen."""
    return (incident.rule, incident.kind, incident.stage, incident.attribution, incident.suspect_ranks, incident.step)


def outcome(size: int, reports: list[Report]) -> list[Incident]:
    """Incidents after three healthy rounds, ``reports``, and a silence past the deadline."""
    world = World(size)
    world.hello()
    world.healthy(3)
    world.feed(*reports)
    world.wait(JUDGE_SECONDS + 1)
    return world.incidents


@st.composite
def arrivals(draw: st.DrawFn, stories: list[Story], *, losses: bool) -> tuple[Story, list[Report]]:
    """A story and its reports as they might arrive: in any order, some twice, and, with ``losses``, some never."""
    story = draw(st.sampled_from(stories))
    reports = story.round().reports()
    if losses:
        kept = draw(st.lists(st.booleans(), min_size=len(reports), max_size=len(reports)))
        reports = [report for report, keep in zip(reports, kept, strict=True) if keep]
    repeats = draw(st.lists(st.sampled_from(reports), max_size=4)) if reports else []
    return story, list(draw(st.permutations([*reports, *repeats])))


@given(arrivals(STORIES, losses=False))
@CORE
def test_order_and_repeats_do_not_change_the_verdict(arrived: tuple[Story, list[Report]]) -> None:
    """However the reports of a round are mixed and repeated, the verdict is the one of the order they were sent in."""
    story, reports = arrived
    (expected,) = outcome(story.size, story.round().reports())
    (one,) = outcome(story.size, reports)
    assert verdict(one) == verdict(expected)
    assert one.missing_ranks == ()
    assert one.suspect_ranks == story.origins


def assert_honest(story: Story, incidents: list[Incident], reports: list[Report]) -> None:
    """Nobody but an origin is accused, and what was not seen is not claimed."""
    whole = {r.rank for r in reports if isinstance(r, RoundClosed) and _has_all_evidence(r, reports)}
    for one in incidents:
        assert set(one.suspect_ranks) <= set(story.origins), one.reason
        assert set(one.missing_ranks) == set(range(story.size)) - whole
        if one.attribution is Attribution.REDUCTION_INDUCED:
            assert story.induced, one.reason
        if one.suspect_ranks != story.origins:
            assert one.missing_ranks, one.reason


def _has_all_evidence(closed: RoundClosed, reports: list[Report]) -> bool:
    orders = {r.order for r in reports if isinstance(r, Evidence) and r.rank == closed.rank}
    return len(orders) == closed.evidence


@given(arrivals(PLAIN_STORIES, losses=True))
@CORE
def test_losses_never_accuse_the_innocent(arrived: tuple[Story, list[Report]]) -> None:
    """Whatever is lost, the verdict names no innocent rank and lists the ranks it lacks."""
    story, reports = arrived
    assert_honest(story, outcome(story.size, reports), reports)


def _without(story: Story, rank: int, *orders: int) -> tuple[Story, list[Report]]:
    return story, story.tell(Round(story.size, 3)).lost(rank, *orders).reports()


@given(arrivals(CHAINED_STORIES, losses=True))
@example(_without(CHAINED_STORIES[0], 0, 0))
@example(_without(CHAINED_STORIES[0], 1, 0))
@example(_without(CHAINED_STORIES[1], 1, 0))
@settings(CORE, report_multiple_bugs=False)
def test_losses_never_turn_a_receiver_into_an_origin(arrived: tuple[Story, list[Report]]) -> None:
    """The same where NaN travels on through collectives within the round, so that the first evidence of a rank decides."""
    story, reports = arrived
    assert_honest(story, outcome(story.size, reports), reports)


@given(arrivals(PLAIN_STORIES, losses=True))
@example((PLAIN_STORIES[0], PLAIN_STORIES[0].round().evidence(0)))
@settings(CORE, report_multiple_bugs=False)
def test_losses_before_the_end_of_the_run_never_accuse_the_innocent(arrived: tuple[Story, list[Report]]) -> None:
    """The same when the run ends before the deadline."""
    story, reports = arrived
    world = World(story.size)
    world.hello()
    world.healthy(3)
    world.feed(*reports, RunEnded())
    assert_honest(story, world.incidents, reports)


# --- any events at all ---------------------------------------------------------------------------------------------------

small = st.integers(-1, 5)
ranks = st.integers(-1, 3)
attempts = st.integers(0, 2)
numbers = st.floats(allow_nan=True, allow_infinity=True)
words = st.text(max_size=8)
checks = st.builds(Check, numel=small, nan=st.integers(0, 2), inf=st.integers(0, 2), absmax=numbers)
collectives = st.builds(
    Collective,
    group=st.sampled_from(["0", "1"]),
    ranks=st.sampled_from([(), (0, 1), (1, 2), (7,)]),
    index=small,
    op=st.sampled_from(["allreduce_", "_reduce_scatter_base_", ""]),
    reduce_op=st.sampled_from(["SUM", "MAX", ""]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "int64", ""]),
    role=st.sampled_from(Role),
    wire=checks,
    reduced=st.none() | checks,
    raw=st.none() | checks,
    narrowed=st.booleans(),
)
evidences = st.builds(
    Evidence,
    attempt=attempts,
    rank=ranks,
    round=small,
    step=small,
    order=small,
    phase=st.sampled_from(Phase),
    at=numbers,
    check=checks,
    parameters=st.lists(words, max_size=2).map(tuple),
    parameters_total=small,
    collective=st.none() | collectives,
    value=st.none() | numbers,
    note=words,
)
syncs = st.builds(
    GroupSync,
    group=st.sampled_from(["0", "1"]),
    ranks=st.sampled_from([(), (0, 1), (1, 2), (7,)]),
    size=small,
    collectives=small,
    identity=small,
    fingerprint=small,
    norm=numbers,
    audited=small,
    sum_in=numbers,
    sum_out=numbers,
    audited_numel=small,
    audited_absmax=numbers,
    audited_op=st.sampled_from(["SUM", "AVG", ""]),
    audited_dtype=st.sampled_from(["float16", "float32", ""]),
)
closings = st.builds(
    RoundClosed,
    attempt=attempts,
    rank=ranks,
    round=small,
    step=small,
    closed_by=st.sampled_from(ClosedBy),
    at=numbers,
    evidence=small,
    checks=small,
    loss=st.none() | numbers,
    loss_scale=st.none() | numbers,
    skipped=st.booleans(),
    params_nonfinite=st.none() | st.booleans(),
    buffers_nonfinite=st.none() | st.booleans(),
    backwards=small,
    activations=small,
    gradient_absmax=st.none() | numbers,
    sync=st.lists(syncs, max_size=2).map(tuple),
    unreduced=st.lists(words, max_size=2).map(tuple),
    unreduced_total=small,
    weights=st.lists(st.builds(Weights, st.sampled_from(["0", UNREDUCED]), small, small), max_size=2).map(tuple),
)
others = st.one_of(
    st.builds(Hello, attempts, ranks, ranks, small, st.integers(0, 5), small, words, words, words, numbers),
    st.builds(
        PartWritten, attempts, ranks, small, small, small, words, small, numbers, st.sampled_from(["", "no space"])
    ),
    st.builds(Counted, attempts, ranks, small, st.dictionaries(words, small, max_size=2), st.just({})),
    st.builds(Disabled, attempts, ranks, words),
    st.builds(Goodbye, attempts, ranks, small, st.booleans(), words),
    st.builds(NodeEnded, attempts, small, small),
)
events: st.SearchStrategy[Event] = st.one_of(
    evidences.map(Received),
    closings.map(Received),
    others.map(Received),
    st.builds(Expect, st.integers(0, 5)),
    st.just(Tick()),
    st.just(RunEnded()),
)
histories = st.lists(st.tuples(events, st.floats(0, 30)), max_size=25)


def commands_of(history: list[tuple[Event, float]]) -> list[str]:
    """All commands of a fresh tracker, as text (NaN equals itself there)."""
    tracker, now, commands = Tracker("run"), T0, []
    for event, later in history:
        now += later
        commands += tracker.handle(event, now)
    return [repr(command) for command in commands]


@given(histories)
@CORE
def test_no_events_make_the_core_raise_and_the_same_events_give_the_same_commands(
    history: list[tuple[Event, float]],
) -> None:
    """Events in, commands out: nothing else goes in, and nothing a peer can send stops it."""
    assert commands_of(history) == commands_of(history)


@given(histories)
@CORE
def test_every_incident_can_be_stored_and_read_back(history: list[tuple[Event, float]]) -> None:
    """Whatever numbers the evidence holds, the incident's JSON is whole."""
    tracker, now = Tracker("run"), T0
    for event, later in history:
        now += later
        tracker.handle(event, now)
    for one in tracker.incidents.values():
        text = one.model_dump_json()
        assert Incident.model_validate_json(text).model_dump_json() == text


def test_the_reports_of_a_story_are_what_the_properties_think() -> None:
    """The stories have evidence, and at least one of them holds NaN: the properties are not about nothing."""
    assert all(story.round().evidence() for story in STORIES)
    assert any(math.isnan(e.value) for story in STORIES for e in story.round().evidence() if e.value is not None)
