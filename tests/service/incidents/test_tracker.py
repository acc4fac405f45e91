"""The life of incidents: opened, seen again, corrected, resolved, told apart."""

from __future__ import annotations

import pytest
from service.incidents.rounds import HALF_BUCKET, INF, Round, World, saved

from sentinel.incidents.book import SAME_FAULT_ROUNDS
from sentinel.incidents.events import Command, RequestParts, RunEnded, SaveIncident
from sentinel.incidents.model import Attribution, Cause, Kind, Stage, State, utc
from sentinel.incidents.tracker import JUDGE_SECONDS, RESOLVE_ROUNDS
from sentinel.wire.messages import ClosedBy, Counted, Phase


def test_a_healthy_run_opens_nothing() -> None:
    """Rounds are counted, and that is all."""
    world = World(2)
    assert world.healthy(50) == []
    assert world.tracker.counts.rounds_checked == 50
    assert world.incidents == []


def test_an_incident_opens_when_its_round_is_whole() -> None:
    """Not before the last rank has closed the round, and at once then."""
    world = World(2)
    world.healthy(3)
    *early, last = world.round().nan_gradient(1).reports()
    assert world.feed(*early) == []
    first, *_ = world.feed(last)
    assert isinstance(first, SaveIncident)
    assert first.is_new
    assert (first.incident.kind, first.incident.suspect_ranks) == (Kind.NONFINITE_GRADIENT, (1,))


def test_an_incident_is_dated_by_its_origin_and_its_detection() -> None:
    """Step, round and attempt are the fault's; opened_at is ours."""
    world = World(2)
    world.healthy(3)
    world.now += 5
    world.tell(world.round().nan_gradient(1).closed(step=17))
    one = world.incident
    assert (one.step, one.round, one.last_round, one.attempt) == (17, 3, 3, 0)
    assert (one.opened_at, one.state, one.occurrences, one.world_size) == (utc(world.now), State.OPEN, 1, 2)
    assert one.id.startswith("a0-r000003")


def test_parameters_after_a_step_date_back_to_that_step() -> None:
    """They were found at the start of round 5; step 4 made them so."""
    world = World(2)
    world.healthy(5)
    world.tell(world.round().saw(Phase.PARAMS).closed(params_nonfinite=True))
    assert (world.incident.round, world.incident.step, world.incident.last_round) == (4, 4, 5)
    assert world.incident.stage is Stage.OPTIMIZER


def test_evidence_is_judged_after_a_silence_with_what_is_there() -> None:
    """A rank that never closes its round does not keep the incident from being seen."""
    world = World(2)
    world.tell(world.round().nan_gradient(1).unclosed(0))
    assert saved(world.wait(JUDGE_SECONDS - 0.1)) == []
    (opened,) = saved(world.wait(0.2))
    assert opened.incident.suspect_ranks == (1,)
    assert opened.incident.missing_ranks == (0,)


def test_every_report_of_the_round_starts_the_wait_anew() -> None:
    """The deadline counts from the last report, not from the first."""
    world = World(3)
    told = world.round().nan_gradient(1)
    world.feed(*told.evidence(), *told.closings(1))
    world.wait(JUDGE_SECONDS - 0.5)
    world.feed(*told.closings(0))
    assert saved(world.wait(JUDGE_SECONDS - 0.5)) == []
    assert saved(world.wait(1.0))


def test_a_healthy_round_is_never_judged_for_lateness() -> None:
    """A slow rank is no fault."""
    world = World(2)
    world.tell(world.round().unclosed(1))
    assert world.wait(1e4) == []


def test_ranks_that_left_are_not_waited_for() -> None:
    """A round after their last is whole without them."""
    world = World(3)
    world.hello()
    world.healthy(3)
    world.feed(world.goodbye(2, last_round=2))
    assert saved(world.tell(world.round().raw(1).unclosed(2)))
    assert world.incident.missing_ranks == ()


def test_the_end_of_the_run_judges_what_is_open() -> None:
    """No more reports will come."""
    world = World(2)
    world.hello()
    world.feed(*world.round().raw(1).evidence())
    assert saved(world.feed(RunEnded()))
    assert world.incident.suspect_ranks == (1,)


def test_a_fault_seen_after_the_run_ended_is_still_judged() -> None:
    """A relay may deliver its spool late."""
    world = World(2)
    world.healthy(2)
    world.feed(RunEnded())
    world.tell(world.round().nan_gradient(0))
    world.feed(RunEnded())
    assert world.incident.suspect_ranks == (0,)


# --- the same fault, another fault ---------------------------------------------------------------------------------------


def test_an_echo_updates_the_incident_that_made_it() -> None:
    """Rounds that start with the damaged parameters are the first fault's, on every rank."""
    world = World(2)
    world.healthy(3)
    world.tell(world.round().nan_gradient(1))
    for _ in range(4):
        world.tell(world.round().loss().nan_gradient(0, 1).saw(Phase.PARAMS).closed(params_nonfinite=True))
    one = world.incident
    assert (one.occurrences, one.last_round, one.state) == (5, 7, State.UPDATED)
    assert (one.step, one.round, one.suspect_ranks, one.stage) == (3, 3, (1,), Stage.PRE_REDUCE)


def test_damaged_buffers_make_an_echo_too() -> None:
    """BatchNorm keeps NaN after a skipped step."""
    world = World(2)
    world.tell(world.round().nan_gradient(1))
    world.tell(world.round().nan_gradient(0, 1).saw(Phase.BUFFERS).closed(buffers_nonfinite=True))
    assert world.incident.occurrences == 2


def test_the_flag_of_the_closing_record_alone_makes_an_echo() -> None:
    """The evidence about parameters may be over a rank's limit."""
    world = World(2)
    world.tell(world.round().nan_gradient(1))
    world.tell(world.round().nan_gradient(0, 1).closed(ClosedBy.OPTIMIZER, 0, params_nonfinite=True))
    assert world.incident.occurrences == 2


def test_a_loss_warning_damages_nothing_so_it_has_no_echo() -> None:
    """Nonfinite parameters after a mere warning are a fault of their own."""
    world = World(2)
    world.tell(world.round().loss(1))
    world.tell(world.round().loss().nan_gradient(0, 1).saw(Phase.PARAMS).closed(params_nonfinite=True))
    assert [i.kind for i in world.incidents] == [Kind.NONFINITE_LOSS, Kind.NONFINITE_PARAMETERS]


def test_the_same_fault_again_is_one_incident() -> None:
    """One rank keeps making NaN while its steps are skipped."""
    world = World(2)
    for _ in range(3):
        world.tell(world.round().nan_gradient(1))
        world.healthy(2)
    one = world.incident
    assert (one.occurrences, one.round, one.last_round) == (3, 0, 6)


@pytest.mark.parametrize(("apart", "expected"), [(SAME_FAULT_ROUNDS, 1), (SAME_FAULT_ROUNDS + 1, 2)])
def test_the_same_fault_long_after_is_another_incident(apart: int, expected: int) -> None:
    """Nearness counts from the last time it was seen."""
    world = World(2)
    world.tell(world.round().nan_gradient(1))
    world.healthy(apart - 1)
    world.tell(world.round().nan_gradient(1))
    assert len(world.incidents) == expected


def test_another_ranks_fault_is_another_incident() -> None:
    """Rank 0 joins in the next round: two faults, told apart."""
    world = World(2)
    world.tell(world.round().nan_gradient(1), world.round().nan_gradient(0))
    assert [i.suspect_ranks for i in world.incidents] == [(1,), (0,)]


def test_another_stage_is_another_incident() -> None:
    """An overflow in the reduction is not the NaN of rank 1."""
    world = World(2)
    world.tell(world.round().nan_gradient(1))
    world.tell(world.round().reduced(of=HALF_BUCKET, found=INF, absmax=40_000.0))
    assert [i.stage for i in world.incidents] == [Stage.PRE_REDUCE, Stage.POST_REDUCE]
    assert world.incidents[1].attribution is Attribution.REDUCTION_INDUCED


def test_a_fault_that_spread_is_the_same_fault() -> None:
    """The suspects need only overlap."""
    world = World(3)
    world.tell(world.round().nan_gradient(1), world.round().nan_gradient(1, 2))
    assert world.incident.occurrences == 2


def test_incident_ids_are_unique() -> None:
    """Also when two attempts fail in the same round."""
    world = World(2)
    world.tell(world.round().nan_gradient(1), world.round().nan_gradient(0))
    world.restart()
    world.tell(world.round().nan_gradient(1))
    assert len({i.id for i in world.incidents}) == 3


def test_a_growing_loss_is_remembered_when_it_breaks() -> None:
    """A thousandfold within the last rounds: the optimization is the first suspicion."""
    world = World(2)
    world.tell(*(world.round().closed(loss=loss) for loss in (2.0, 30.0, 9_000.0)))
    world.tell(world.round().loss().nan_gradient(0, 1).closed(loss=float("nan")))
    assert world.incident.cause is Cause.OPTIMIZATION


@pytest.mark.parametrize("order", [(3, 0, 1, 2), (3, 2, 1, 0), (0, 3, 2, 1), (1, 3, 0, 2)])
def test_a_growing_loss_may_be_told_after_it_broke(order: tuple[int, ...]) -> None:
    """What is urgent overtakes what is not on its way here: the cause is the same in every order."""
    world = World(2)
    rounds = [world.round().closed(loss=loss) for loss in (2.0, 30.0, 9_000.0)]
    rounds.append(world.round().loss().nan_gradient(0, 1).closed(loss=float("nan")))
    world.tell(*(rounds[number] for number in order))
    assert world.incident.cause is Cause.OPTIMIZATION
    assert len(world.incidents) == 1


def test_losses_after_a_fault_say_nothing_of_its_cause() -> None:
    """A loss that grows once the gradients were nonfinite is a consequence."""
    world = World(2)
    world.tell(*(world.round().closed(loss=loss) for loss in (2.0, 3.0, 2.5)))
    world.tell(world.round().nan_gradient(0, 1))
    world.tell(world.round().closed(loss=9_000.0))
    assert world.incident.cause is Cause.NUMERICS


def test_a_settled_loss_that_breaks_is_a_matter_of_numerics() -> None:
    """Ordinary ups and downs are no growth."""
    world = World(2)
    world.tell(*(world.round().closed(loss=loss) for loss in (2.0, 30.0, 0.5, 4.0)))
    world.tell(world.round().loss().nan_gradient(0, 1).closed(loss=float("nan")))
    assert world.incident.cause is Cause.NUMERICS


def test_a_fault_in_every_round_is_counted_each_time_and_saved_now_and_then() -> None:
    """A run that trains on with nonfinite weights for days does not write to disk every round, and loses no count."""
    world = World(2)
    world.tell(world.round().nan_gradient(1))
    commands: list[Command] = []
    for _ in range(99):
        world.now += 0.01
        commands += world.tell(world.round().nan_gradient(0, 1).closed(params_nonfinite=True))
    assert world.incident.occurrences == 100
    assert len(saved(commands)) < 20
    (last,) = saved(world.feed(RunEnded()))
    assert last.incident.occurrences == 100


def test_what_was_counted_and_not_saved_is_saved_a_moment_later() -> None:
    """Time alone is enough."""
    world = World(2)
    world.tell(world.round().nan_gradient(1))
    for _ in range(4):
        world.tell(world.round().nan_gradient(0, 1).closed(params_nonfinite=True))
    assert [s.incident.occurrences for s in saved(world.wait(1.5))] == [5]
    assert saved(world.wait(1.5)) == []


# --- resolved, restarted -------------------------------------------------------------------------------------------------


def test_enough_healthy_rounds_resolve_an_incident_once() -> None:
    """One save, and no more after it."""
    world = World(2)
    world.tell(world.round().nan_gradient(1))
    assert world.healthy(RESOLVE_ROUNDS - 1) == []
    (done,) = saved(world.healthy(1))
    assert done.incident.state is State.RESOLVED
    assert world.healthy(RESOLVE_ROUNDS) == []


def test_a_repeat_starts_the_count_of_healthy_rounds_anew() -> None:
    """Nineteen healthy rounds and a relapse are not twenty."""
    world = World(2)
    for _ in range(2):
        world.tell(world.round().nan_gradient(1))
        world.healthy(SAME_FAULT_ROUNDS - 1)
    assert saved(world.healthy(RESOLVE_ROUNDS - SAME_FAULT_ROUNDS)) == []
    assert [s.incident.state for s in saved(world.healthy(1))] == [State.RESOLVED]


def test_a_restart_neither_continues_nor_echoes_the_first_attempts_incident() -> None:
    """Parameters nonfinite in a fresh attempt were loaded so: an incident of its own."""
    world = World(2)
    world.hello()
    world.healthy(2)
    world.tell(world.round().nan_gradient(1))
    world.restart()
    world.hello()
    world.tell(world.round().saw(Phase.INIT).nan_gradient(0, 1).closed(params_nonfinite=True))
    assert [(i.attempt, i.kind) for i in world.incidents] == [
        (0, Kind.NONFINITE_GRADIENT),
        (1, Kind.NONFINITE_PARAMETERS),
    ]


def test_a_restart_judges_the_old_attempts_rounds_at_once() -> None:
    """Nothing more will come of them."""
    world = World(2)
    world.hello()
    world.tell(world.round().nan_gradient(1).unclosed(0))
    world.restart()
    (opened,) = saved(world.hello(0))
    assert (opened.incident.attempt, opened.incident.missing_ranks) == (0, (0,))


def test_rounds_of_two_attempts_do_not_mix() -> None:
    """Round 0 of attempt 1 waits for its own closings."""
    world = World(2)
    world.hello()
    world.tell(world.round().unclosed(1))
    world.restart()
    world.hello()
    told = world.round().nan_gradient(1)
    assert saved(world.feed(*told.evidence(), *told.closings(1))) == []
    assert saved(world.feed(*told.closings(0)))


# --- late and repeated reports -------------------------------------------------------------------------------------------


def test_late_reports_correct_the_verdict() -> None:
    """Judged incomplete at the deadline; the guilty rank's reports then name it, in the same incident."""
    world = World(2)
    told = world.round().nan_gradient(1)
    world.feed(*told.evidence(0), *told.closings(0))
    (first,) = saved(world.wait(JUDGE_SECONDS + 1))
    assert (first.incident.attribution, first.incident.suspect_ranks) == (Attribution.NONE, ())
    *_, last = saved(world.feed(*told.evidence(1), *told.closings(1)))
    assert (last.incident.id, last.is_new, last.incident.state) == (first.incident.id, False, State.UPDATED)
    assert (last.incident.suspect_ranks, last.incident.stage) == ((1,), Stage.PRE_REDUCE)
    assert last.incident.missing_ranks == ()


def test_a_verdict_waits_for_the_earlier_round() -> None:
    """An echo must not be judged before its origin, even when it is whole first."""
    world = World(2)
    origin, echo = world.round().nan_gradient(1), world.round().nan_gradient(0, 1).saw(Phase.PARAMS)
    echo.closed(params_nonfinite=True)
    world.feed(*origin.evidence(), *origin.closings(0))
    assert saved(world.tell(echo)) == []
    world.feed(*origin.closings(1))
    assert (world.incident.round, world.incident.occurrences) == (0, 2)


def test_a_late_origin_does_not_hold_up_healthy_rounds() -> None:
    """Only rounds with evidence are judged in order."""
    world = World(2)
    world.tell(world.round().nan_gradient(1).unclosed(0))
    world.healthy(3)
    assert world.tracker.counts.rounds_checked == 3


def test_a_part_is_asked_of_every_rank_that_wrote_none() -> None:
    """Innocent ranks too: replay needs them all."""
    world = World(3)
    world.hello()
    told = world.round().nan_gradient(1)
    world.feed(world.part(1, told.number))
    commands = world.tell(told)
    assert commands[-1] == RequestParts(0, 0, (0, 2))


def test_counts_are_added_up_over_ranks_and_relays() -> None:
    """Each sender's newest totals count once."""
    world = World(2)
    world.feed(Counted(0, 0, 0, {"queue_full": 2}, {"tap": 1}), Counted(0, 0, 0, {"queue_full": 5}, {"tap": 1}))
    world.feed(Counted(0, -1, 0, {"queue_full": 1}, {}), Counted(0, -1, 1, {"age": 4}, {}))
    assert dict(world.tracker.counts.drops()) == {"queue_full": 6, "age": 4}
    assert dict(world.tracker.counts.faults()) == {"tap": 1}


def test_rounds_too_many_to_wait_for_are_given_up_and_counted() -> None:
    """A rank whose samples are all lost must not fill the memory; rounds with evidence stay."""
    world = World(2)
    world.tell(world.round().nan_gradient(1).unclosed(1))
    world.tell(*(world.round().unclosed(1) for _ in range(300)))
    assert world.tracker.counts.windows_given_up > 0
    assert len(world.tracker._windows) <= 256
    world.wait(JUDGE_SECONDS + 1)
    assert world.incident.round == 0


def test_a_world_of_unknown_size_is_the_ranks_heard_of() -> None:
    """A verdict is possible before any hello."""
    world = World(0)
    world.tell(Round(2, 0).raw(0, 1))
    assert world.incident.suspect_ranks == (0, 1)
