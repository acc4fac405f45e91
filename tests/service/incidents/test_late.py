"""Reports that come twice, late, out of order or never: the verdict stays right, or says what it lacks."""

from __future__ import annotations

from service.incidents.rounds import HALF_BUCKET, INF, Round, World, saved

from sentinel.incidents.events import RunEnded
from sentinel.incidents.model import Attribution, Incident, Kind, State
from sentinel.incidents.tracker import JUDGE_SECONDS, RESOLVE_ROUNDS
from sentinel.wire.messages import Disabled, Phase


def faulty(size: int = 2) -> tuple[World, Round]:
    """A world after a round in which rank 1 made NaN, and that round."""
    world = World(size)
    world.hello()
    world.healthy(2)
    told = world.round().nan_gradient(1)
    world.tell(told)
    return world, told


def unaccused(incident: Incident) -> bool:
    """True if the incident accuses nobody and blames neither the network nor the arithmetic of the sum."""
    return (incident.suspect_ranks, incident.attribution) == ((), Attribution.NONE)


# --- twice ---------------------------------------------------------------------------------------------------------------


def test_repeats_of_a_judged_round_change_nothing() -> None:
    """The same reports once more: no command, and the incident stays as it was opened."""
    world, told = faulty()
    before = world.incident
    assert saved(world.tell(told)) == []
    assert world.incident == before


def test_repeats_of_an_echo_are_not_counted_again() -> None:
    """Two rounds were faulty, however often their reports came."""
    world, _ = faulty()
    echo = world.round().nan_gradient(0, 1).closed(params_nonfinite=True)
    world.tell(echo, echo)
    assert world.incident.occurrences == 2


def test_repeats_of_a_recurrence_are_not_counted_again() -> None:
    """The same fault in another round is one more, not one more per delivery."""
    world, _ = faulty()
    again = world.round().nan_gradient(1)
    world.tell(again, again)
    assert world.incident.occurrences == 2


def test_late_reports_of_a_recurrence_do_not_rewrite_the_origin() -> None:
    """The incident says what happened in the round it is dated to; a later, wider round is only counted."""
    world, _ = faulty(3)
    wider = world.round().nan_gradient(1, 2)
    world.tell(wider, wider)
    assert world.incident.suspect_ranks == (1,)


def test_repeats_of_a_quiet_round_are_not_counted_again() -> None:
    """One skip is one benign skip."""
    world = World(2)
    told = world.round().nan_gradient(1, found=INF).scaler_skip(65536.0)
    world.tell(told, told)
    assert world.tracker.counts.benign_skips == 1


def test_a_repeat_does_not_reopen_a_resolved_incident() -> None:
    """A frame that was acknowledged into the void comes again, long after."""
    world, told = faulty()
    world.healthy(RESOLVE_ROUNDS)
    world.tell(told)
    assert world.incident.state is State.RESOLVED


def test_repeats_of_healthy_rounds_open_nothing() -> None:
    """They are samples; a repeat may at most be counted."""
    world = World(2)
    told = world.round()
    assert world.tell(told, told) == []


# --- late ----------------------------------------------------------------------------------------------------------------


def test_late_reports_of_the_innocent_confirm_the_verdict() -> None:
    """What was missing is no longer, and the suspects stay."""
    world = World(2)
    told = world.round().nan_gradient(1)
    world.feed(*told.evidence(1), *told.closings(1))
    world.wait(JUDGE_SECONDS + 1)
    assert world.incident.missing_ranks == (0,)
    world.feed(*told.evidence(0), *told.closings(0))
    whole = world.incident
    assert (whole.suspect_ranks, whole.missing_ranks, whole.occurrences) == ((1,), (), 1)


def test_an_earlier_round_that_comes_late_is_no_recurrence_of_a_later_one() -> None:
    """Its reports were held up; the fault of round 2 began before that of round 5, and is dated so."""
    world = World(2)
    world.tell(world.round(5).nan_gradient(1), world.round(2).nan_gradient(1))
    assert sorted(i.round for i in world.incidents) == [2, 5]


def test_a_verdict_that_turns_out_to_be_an_ordinary_skip_does_not_stay_open() -> None:
    """Judged before any closing record came; the records then say that the scaler was searching."""
    world = World(2)
    told = world.round().nan_gradient(1, found=INF).scaler_skip(65536.0)
    world.feed(*told.evidence())
    world.wait(JUDGE_SECONDS + 1)
    world.feed(*told.closings())
    assert world.incident.state is State.RESOLVED


def test_rounds_that_come_first_do_not_change_an_earlier_rounds_verdict() -> None:
    """NaN in mid-run is an incident, also if the next healthy round is whole before it is."""
    world = World(2)
    world.healthy(5, scale=1024.0)
    told = world.round().nan_gradient(1).scaler_skip(1024.0)
    world.feed(*told.evidence(), *told.closings(1))
    world.healthy(1, scale=512.0)
    world.feed(*told.closings(0))
    assert world.incidents != []
    assert world.incident.suspect_ranks == (1,)


# --- never ---------------------------------------------------------------------------------------------------------------


def test_a_disabled_agents_rank_may_be_the_guilty_one() -> None:
    """Rank 1 trains on unwatched: when rank 0 gets NaN from the reduction, neither rank 0 nor the sum is to blame."""
    world = World(2)
    world.hello()
    world.healthy(2)
    world.feed(Disabled(0, 1, "too many faults"))
    world.tell(world.round().reduced(0).unclosed(1))
    world.wait(JUDGE_SECONDS + 1)
    assert unaccused(world.incident)
    assert world.incident.missing_ranks == (1,)


def test_a_rank_killed_in_the_faulty_round_may_be_the_guilty_one() -> None:
    """Rank 1's node died before its evidence got out; rank 0's nonfinite result accuses nobody."""
    world = World(2, node_of={1: 1})
    world.hello()
    world.healthy(2)
    world.tell(world.round().reduced(0).unclosed(1))
    world.feed(world.node_ended(1))
    world.wait(JUDGE_SECONDS + 1)
    assert unaccused(world.incident)


def test_the_end_of_the_run_does_not_turn_missing_reports_into_finite_inputs() -> None:
    """The job was killed in the faulty round; only the innocent rank's evidence is here."""
    world = World(2)
    world.hello()
    world.healthy(2)
    world.feed(*world.round().nan_gradient(1).evidence(0))
    world.feed(RunEnded())
    assert unaccused(world.incident)


def test_a_silent_rank_does_not_make_every_skip_look_like_a_search() -> None:
    """Rank 2's samples are lost for good; that the scale did well is known from the others."""
    world = World(3)
    world.hello()
    world.tell(*(world.round().closed(loss_scale=1024.0).unclosed(2) for _ in range(30)))
    world.tell(world.round().nan_gradient(1).scaler_skip(1024.0).unclosed(2))
    world.wait(JUDGE_SECONDS + 1)
    assert [i.suspect_ranks for i in world.incidents] == [(1,)]


def test_a_lost_sample_does_not_keep_incidents_open() -> None:
    """One rank's healthy records are dropped; the others' health still resolves the incident."""
    world, _ = faulty(3)
    for _ in range(4 * RESOLVE_ROUNDS):
        world.tell(world.round().unclosed(2))
        world.wait(1.0)
    assert world.incident.state is State.RESOLVED


def test_a_rank_that_closed_the_round_and_left_is_not_missing() -> None:
    """Its part of the story is whole."""
    world = World(2)
    world.hello()
    told = world.round().reduced(of=HALF_BUCKET, found=INF, absmax=40_000.0)
    world.feed(*told.reports()[:-1])
    world.feed(world.goodbye(0, 0), *told.reports()[-1:])
    assert (world.incident.kind, world.incident.missing_ranks) == (Kind.NONFINITE_GRADIENT, ())


def test_evidence_without_any_record_is_judged_and_says_who_is_missing() -> None:
    """Every closing record was lost; the raw gradients still name their rank."""
    world = World(2)
    world.feed(*world.round().raw(1).saw(Phase.EXIT, 1).evidence())
    world.wait(JUDGE_SECONDS + 1)
    assert (world.incident.suspect_ranks, world.incident.missing_ranks) == ((1,), (0, 1))
