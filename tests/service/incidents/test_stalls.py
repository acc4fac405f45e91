"""Steps: ranks that disagree, scalers that only skip, gradients that are zero, calls in the wrong order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from service.incidents.rounds import INF, Round, World, found, only, sync, synced

from sentinel.incidents.comparisons import at_end
from sentinel.incidents.finding import Finding
from sentinel.incidents.habits import REASONS, judge
from sentinel.incidents.history import History
from sentinel.incidents.model import Attribution, Kind, Severity, Stage
from sentinel.incidents.scaler import MAX_CONSECUTIVE_SKIPS
from sentinel.incidents.stalls import UNMOVED_AT_END, UNMOVED_ROUNDS, ZERO_ROUNDS, ZERO_ROUNDS_LATER
from sentinel.wire.messages import SECOND_MOMENT, UNREDUCED, ClosedBy, Guarded, Phase, Weights

SKIPPED = {"closed_by": ClosedBy.FRAMEWORK_SKIPPED, "skipped": True}

# --- disagreement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "skipping", "suspects", "attribution"),
    [
        (3, (1,), (1,), Attribution.RANK_LOCAL),
        (3, (0, 2), (1,), Attribution.RANK_LOCAL),
        (2, (1,), (0, 1), Attribution.ALL_RANKS),
        (5, (0, 4), (0, 4), Attribution.MULTI_RANK),
    ],
)
def test_ranks_that_step_while_others_skip_are_found(
    size: int, skipping: tuple[int, ...], suspects: tuple[int, ...], attribution: Attribution
) -> None:
    """The minority is accused; of two ranks, both; the reason says who skipped."""
    told = synced(size, {})
    for rank in skipping:
        told.record(rank, **SKIPPED)
    verdict = only(found(told)).verdict
    assert (verdict.rule, verdict.kind, verdict.stage) == (
        "step_disagreement",
        Kind.STEP_DISAGREEMENT,
        Stage.OPTIMIZER,
    )
    assert (verdict.suspect_ranks, verdict.attribution) == (suspects, attribution)
    assert all(str(rank) in verdict.reason for rank in skipping)


def test_a_disagreement_is_seen_in_nonfinite_rounds_too() -> None:
    """That is when ranks disagree: one saw NaN and left the step out."""
    told = synced(3, {}).loss(1).record(1, **SKIPPED)
    assert [one.verdict.rule for one in found(told)] == ["step_disagreement"]


def test_ranks_that_reduce_nothing_together_may_step_as_they_like() -> None:
    """Independent trainings under one launcher."""
    assert found(Round(3, 4).record(1, **SKIPPED)) == []


def test_a_rank_that_leaves_in_mid_round_disagrees_with_nobody() -> None:
    """The job is ending."""
    assert found(synced(3, {}).record(1, closed_by=ClosedBy.EXIT)) == []


# --- the scaler ----------------------------------------------------------------------------------------------------------


def skips(history: History, scales: list[float], *, first: int = 0) -> list[Finding]:
    """Findings of consecutive skips at these scales."""
    return [
        one
        for number, scale in enumerate(scales, start=first)
        for one in found(Round(2, number).nan_gradient(0, 1, found=INF).scaler_skip(scale), history)
    ]


def test_twenty_skips_in_a_row_are_a_collapse_told_once() -> None:
    """Dated to the first skip, on all ranks."""
    one = only(skips(History(), [2.0 ** (16 - i // 2) for i in range(2 * MAX_CONSECUTIVE_SKIPS)], first=3))
    assert (one.verdict.rule, one.verdict.kind, one.verdict.stage) == (
        "scaler_collapse",
        Kind.SCALER_COLLAPSE,
        Stage.PRE_REDUCE,
    )
    assert (one.verdict.attribution, one.round, one.step) == (Attribution.ALL_RANKS, 3, 3)


def test_a_scale_below_one_is_a_collapse_sooner() -> None:
    """No need to wait for twenty skips."""
    assert only(skips(History(), [2.0, 1.0, 0.5, 0.25])).round == 0


@pytest.mark.parametrize("scales", [[2.0 ** (16 - i) for i in range(MAX_CONSECUTIVE_SKIPS - 4)], [0.5, 0.25]])
def test_a_search_is_no_collapse(scales: list[float]) -> None:
    """From 2**16 down to 1, or a single dip."""
    assert skips(History(), scales) == []


def test_a_step_in_between_starts_the_count_anew() -> None:
    """Skips now and then are ordinary."""
    history = History()
    for start in range(0, 100, MAX_CONSECUTIVE_SKIPS):
        assert skips(history, [1024.0] * (MAX_CONSECUTIVE_SKIPS - 1), first=start) == []
        assert found(Round(2, start + MAX_CONSECUTIVE_SKIPS - 1).closed(loss_scale=512.0), history) == []


# --- zeros ---------------------------------------------------------------------------------------------------------------


def zeros(history: History, numbers: range, largest: float | None = 0.0) -> list[Finding]:
    """Findings of rounds whose largest gradient is ``largest`` on both ranks."""
    return [one for n in numbers for one in found(Round(2, n).closed(gradient_absmax=largest), history)]


def test_gradients_that_are_zero_from_the_start_are_a_stall() -> None:
    """After a few rounds, once, dated to the first."""
    one = only(zeros(History(), range(20)))
    assert (one.verdict.rule, one.verdict.kind, one.verdict.severity) == (
        "zero_gradients",
        Kind.STALLED_TRAINING,
        Severity.WARNING,
    )
    assert (one.verdict.suspect_ranks, one.round) == ((0, 1), 0)
    assert str(ZERO_ROUNDS) in one.verdict.reason


def test_gradients_that_become_zero_later_are_given_more_time() -> None:
    """The data may say so for a while."""
    history = History()
    assert zeros(history, range(5), 1.0) == []
    assert zeros(history, range(5, 5 + ZERO_ROUNDS_LATER - 1)) == []
    assert only(zeros(history, range(5 + ZERO_ROUNDS_LATER - 1, 200))).round == 5


@pytest.mark.parametrize("largest", [1e-30, None])
def test_small_or_unseen_gradients_are_no_stall(largest: float | None) -> None:
    """Only what was looked at and is exactly zero."""
    assert zeros(History(), range(100), largest) == []


def test_one_rank_with_zero_gradients_is_no_stall() -> None:
    """It may be out of batches."""
    history = History()
    for number in range(100):
        told = Round(2, number).closed(gradient_absmax=1.0).record(1, gradient_absmax=0.0)
        assert found(told, history) == []


def test_a_round_with_a_gradient_ends_the_streak() -> None:
    """And the next streak is a later one."""
    history = History()
    assert zeros(history, range(ZERO_ROUNDS - 1)) == []
    assert zeros(history, range(ZERO_ROUNDS - 1, ZERO_ROUNDS), 1.0) == []
    assert zeros(history, range(ZERO_ROUNDS, 2 * ZERO_ROUNDS)) == []


# --- habits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("note", sorted(REASONS))
def test_a_wrong_order_of_calls_is_misuse_told_once(note: str) -> None:
    """One incident per habit, however many rounds and ranks show it."""
    world = World(2)
    for _ in range(30):
        world.tell(world.round().saw(Phase.MISUSE, note=note))
    one = world.incident
    assert (one.rule, one.kind, one.stage, one.severity) == (note, Kind.MISUSE, Stage.OPTIMIZER, Severity.WARNING)
    assert (one.attribution, one.reason, one.round) == (Attribution.ALL_RANKS, REASONS[note], 0)


def test_two_habits_are_two_findings() -> None:
    """Each with its own reason."""
    first, second = sorted(REASONS)[:2]
    told = Round(2, 3).saw(Phase.MISUSE, 1, note=first).saw(Phase.MISUSE, 0, 1, note=second)
    seen = [(one.verdict.rule, one.verdict.suspect_ranks) for one in judge(told.window(), History())]
    assert sorted(seen) == [(first, (1,)), (second, (0, 1))]


def test_two_habits_are_two_incidents() -> None:
    """Clipping scaled gradients and scaling under bfloat16 are two things to mend."""
    world = World(2)
    for note in sorted(REASONS)[:2]:
        world.tell(world.round().saw(Phase.MISUSE, note=note))
    assert sorted(i.rule for i in world.incidents) == sorted(REASONS)[:2]


def test_an_absorbed_overflow_is_told_once_with_the_last_clean_round() -> None:
    """The audit's finding is a warning of the forward; a round whose loss shows it is another story."""
    world = World(2)
    world.healthy(4)
    for before in ("", "; not in round 2, the last one looked at", ""):
        note = f"mm overflowed float16 at train.py:7 in down.1{before}"
        world.tell(world.round().saw(Phase.AUDIT, 1, note=note))
    one = world.incident
    assert (one.rule, one.kind, one.stage) == ("silent_overflow", Kind.SILENT_OVERFLOW, Stage.FORWARD)
    assert (one.severity, one.suspect_ranks, one.round) == (Severity.WARNING, (1,), 4)
    assert one.reason.startswith("mm overflowed float16 at train.py:7 in down.1 on rank 1 (")
    later = World(2)
    later.tell(later.round().saw(Phase.AUDIT, 1, note="mm overflowed float16; not in round 2, the last one looked at"))
    assert later.incident.reason.endswith("loss and gradients are finite; not in round 2, the last one looked at")
    shown = Round(2, 4).loss(1).saw(Phase.AUDIT, 1, note="mm overflowed")
    assert [told.verdict.rule for told in judge(shown.window(), History())] == []


def test_an_overflown_norm_with_finite_gradients_stalls_training() -> None:
    """Clipping multiplies the update by zero; seen again, it is the same incident."""
    world = World(2)
    for _ in range(3):
        world.tell(world.round().saw(Phase.CLIP, value=float("inf")))
    one = world.incident
    assert (one.rule, one.kind, one.severity) == ("norm_overflow", Kind.STALLED_TRAINING, Severity.WARNING)
    assert (one.occurrences, one.round) == (3, 0)


def test_squares_that_overflowed_are_of_the_step_that_is_over() -> None:
    """They are seen once the step is made, in the round that follows; a second attempt to tell them is not heard."""
    history = History()
    seen = Round(2, 5, step=4).saw(Phase.CLIP, 1, note=SECOND_MOMENT, parameters=("w",))
    seen.step = 5  # what the ranks will say as they close it
    one = only([*judge(seen.window(), history)])
    assert (one.round, one.step, one.verdict.suspect_ranks, one.verdict.parameters) == (4, 4, (1,), ("w",))
    assert [*judge(seen.window(), history)] == []


def test_the_norm_of_nonfinite_gradients_is_no_finding_of_its_own() -> None:
    """The gradients' own verdict says it."""
    world = World(2)
    world.tell(world.round().nan_gradient(1).saw(Phase.CLIP, value=float("nan")))
    assert world.incident.kind is Kind.NONFINITE_GRADIENT


def test_misuse_spoils_no_other_finding() -> None:
    """A round with a wrong call is still compared."""
    told = synced(3, {2: {"fingerprint": 12}}).saw(Phase.MISUSE, 0, note="clip_before_unscale")
    assert [one.verdict.rule for one in found(told)] == ["unequal_results"]


# --- weights that do not move ---------------------------------------------------------------------------------------------


def steps(
    history: History, weights: Iterable[int], group: str = "0", by: ClosedBy = ClosedBy.OPTIMIZER, **closing: Any
) -> list[Finding]:
    """Findings of rounds that begin with these fingerprints of weights, on both ranks."""
    findings: list[Finding] = []
    for number, fingerprint in enumerate(weights):
        told = Round(2, number).closed(by, gradient_absmax=1.0, **closing)
        for rank in (0, 1):
            told.record(rank, weights=(Weights(group, fingerprint, 5),), sync=(sync(2),), backwards=1)
        findings += found(told, history)
    return findings


def test_weights_that_no_step_moves_are_a_stall() -> None:
    """Updates are rounded away in bfloat16: told once, dated to the first step, naming how many there were."""
    history = History()
    one = only(steps(history, [7] * (UNMOVED_ROUNDS + 20)))
    assert (one.verdict.rule, one.verdict.kind, one.verdict.stage) == (
        "unmoved_weights",
        Kind.STALLED_TRAINING,
        Stage.OPTIMIZER,
    )
    assert (one.verdict.suspect_ranks, one.round, one.verdict.severity) == ((0, 1), 0, Severity.WARNING)
    assert f"{UNMOVED_ROUNDS} steps" in one.verdict.reason
    assert at_end(history) == []


@pytest.mark.parametrize(("note", "rule"), [("", "norm_overflow"), (SECOND_MOMENT, "second_moment_overflow")])
def test_what_clipping_or_squaring_stops_is_told_once(note: str, rule: str) -> None:
    """A norm or a square that overflowed is why no weight moves: that is its own finding, and no second one follows."""
    history = History()
    stopped = only([*judge(Round(2).saw(Phase.CLIP, value=float("inf"), note=note).window(), history)])
    assert (stopped.verdict.rule, stopped.verdict.kind) == (rule, Kind.STALLED_TRAINING)
    assert steps(history, [7] * (UNMOVED_ROUNDS + 20)) == []
    assert at_end(history) == []


@pytest.mark.parametrize(("rounds", "told"), [(UNMOVED_AT_END, 0), (UNMOVED_AT_END + 1, 1)])
def test_a_short_run_tells_it_at_its_end(rounds: int, told: int) -> None:
    """The last step's own effect is never seen, and very few steps prove nothing."""
    history = History()
    assert steps(history, [7] * rounds) == []
    assert len(at_end(history)) == told
    assert at_end(history) == []


def test_a_warm_up_from_a_rate_of_zero_is_healthy() -> None:
    """The first steps change nothing, and the others do."""
    history = History()
    assert steps(history, [7] * 20 + list(range(100, 200))) == []
    assert at_end(history) == []


def test_weights_that_stop_moving_later_are_no_stall() -> None:
    """A schedule that has run out: what it has learnt is there."""
    assert steps(History(), [1, 2, 3] + [4] * 100) == []


@pytest.mark.parametrize(
    "closing", [{"skipped": True, "by": ClosedBy.SCALER_SKIP}, {"guarded": Guarded.SKIPPED}], ids=str
)
def test_steps_that_are_left_out_move_nothing_by_right(closing: dict[str, Any]) -> None:
    """By a scaler that searches, or by the guard."""
    history = History()
    assert [one for one in steps(history, [7] * 10, **closing) if one.verdict.rule == "unmoved_weights"] == []
    assert at_end(history) == []


def test_weights_that_nothing_holds_together_say_nothing() -> None:
    """Those of parameters that are not reduced are looked at only now and then, and not always the same."""
    history = History()
    assert steps(history, [7] * 100, group=UNREDUCED) == []
    assert at_end(history) == []


def test_steps_before_the_first_look_do_not_count() -> None:
    """A training that wraps its model after a long warm-up of something else."""
    history = History()
    for number in range(2 * UNMOVED_ROUNDS):
        assert found(Round(2, number).closed(gradient_absmax=1.0), history) == []
    assert steps(history, [7, 7, 7]) == []
    assert at_end(history) == []
