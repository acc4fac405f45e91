"""The rules: one row per story, evidence in, verdict out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from service.incidents.rounds import (
    ACTIVATION,
    BUCKET,
    DERIVED,
    FINITE,
    HALF_BUCKET,
    INF,
    NAN,
    SCALAR,
    SHARD,
    Round,
    collective,
)

from sentinel.incidents.classify import RULES, Quiet, classify
from sentinel.incidents.model import Attribution, Cause, Kind, Severity, Stage, Verdict
from sentinel.incidents.scaler import MAX_CONSECUTIVE_SKIPS, ScalerHistory
from sentinel.wire.messages import ClosedBy, Phase

LEFT = collective(group="left", ranks=(0, 1))
RIGHT = collective(group="right", ranks=(2, 3))
TENSOR_PARALLEL = collective(ACTIVATION, group="tp", ranks=(0, 1))

STEPPED = ScalerHistory(last_step_scale=1024.0, searching=False)


@dataclass(frozen=True)
class Row:
    """One story and the verdict it must get."""

    sentence: str
    told: Round
    rule: str
    kind: Kind
    stage: Stage
    attribution: Attribution
    suspects: tuple[int, ...]
    cause: Cause
    severity: Severity = Severity.CRITICAL
    scaler: ScalerHistory | None = None
    missing: tuple[int, ...] = ()


GRADIENT = Kind.NONFINITE_GRADIENT
LOCAL, MULTI, EVERY = Attribution.RANK_LOCAL, Attribution.MULTI_RANK, Attribution.ALL_RANKS
INDUCED, NOBODY = Attribution.REDUCTION_INDUCED, Attribution.NONE

PARAMETER_ROWS = [
    Row(
        "one rank started from nonfinite weights",
        Round(2).saw(Phase.INIT, 1, parameters=("w",)).nan_gradient(0, 1),
        "parameters_at_start",
        Kind.NONFINITE_PARAMETERS,
        Stage.INIT_WEIGHTS,
        LOCAL,
        (1,),
        Cause.FRAMEWORK,
    ),
    Row(
        "every rank loaded the same broken checkpoint",
        Round(3).saw(Phase.INIT, parameters=("w", "b")),
        "parameters_at_start",
        Kind.NONFINITE_PARAMETERS,
        Stage.INIT_WEIGHTS,
        EVERY,
        (0, 1, 2),
        Cause.FRAMEWORK,
    ),
    Row(
        "the step before left nonfinite parameters on every rank",
        Round(2, 5).loss().nan_gradient(0, 1).saw(Phase.PARAMS, parameters=("w",)),
        "parameters_after_step",
        Kind.NONFINITE_PARAMETERS,
        Stage.OPTIMIZER,
        EVERY,
        (0, 1),
        Cause.OPTIMIZATION,
    ),
    Row(
        "one rank alone came out of the step with nonfinite parameters",
        Round(3, 5).loss(2).nan_gradient(2).saw(Phase.PARAMS, 2),
        "parameters_after_step",
        Kind.NONFINITE_PARAMETERS,
        Stage.OPTIMIZER,
        LOCAL,
        (2,),
        Cause.OPTIMIZATION,
    ),
    Row(
        "nonfinite parameters in round 0 cannot be a step's doing",
        Round(2, 0).saw(Phase.PARAMS, 0),
        "parameters_after_step",
        Kind.NONFINITE_PARAMETERS,
        Stage.PARAMS,
        LOCAL,
        (0,),
        Cause.OPTIMIZATION,
    ),
]

RAW_ROWS = [
    Row(
        "one rank's gradients were NaN though its loss was finite",
        Round(2, 3).nan_gradient(1),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (1,),
        Cause.NUMERICS,
    ),
    Row(
        "one rank's loss was NaN and so were its gradients",
        Round(2, 3).loss(1).nan_gradient(1),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (1,),
        Cause.DATA,
    ),
    Row(
        "two of four ranks had NaN gradients",
        Round(4, 3).nan_gradient(1, 3),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        MULTI,
        (1, 3),
        Cause.NUMERICS,
    ),
    Row(
        "every rank had NaN losses and gradients",
        Round(2, 3).loss().nan_gradient(0, 1),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        EVERY,
        (0, 1),
        Cause.NUMERICS,
    ),
    Row(
        "the only rank of a world of one",
        Round(1, 3).raw(0),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (0,),
        Cause.NUMERICS,
    ),
    Row(
        "a rank raised on its gradients before they were reduced",
        Round(2, 3).raw(1).saw(Phase.EXIT, 1, note="RuntimeError").closed(ClosedBy.EXIT),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (1,),
        Cause.NUMERICS,
    ),
    Row(
        "reduce-scatter: rank 2 gave NaN, only the owner of the shard sees it reduced",
        Round(4, 3).wire(2, of=SHARD).reduced(0, of=SHARD),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (2,),
        Cause.NUMERICS,
    ),
    Row(
        "a later bucket of the round is nonfinite, the first was fine",
        Round(2, 3).nan_gradient(0, of=collective(index=4)),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (0,),
        Cause.NUMERICS,
    ),
    Row(
        "one rank of a group that is not the world",
        Round(4, 3).nan_gradient(3, of=RIGHT),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (3,),
        Cause.NUMERICS,
    ),
    Row(
        "every rank of a group that is not the world",
        Round(4, 3).nan_gradient(2, 3, of=RIGHT),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        EVERY,
        (2, 3),
        Cause.NUMERICS,
    ),
    Row(
        "one rank in each of two groups",
        Round(4, 3).nan_gradient(1, of=LEFT).nan_gradient(2, of=RIGHT),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        MULTI,
        (1, 2),
        Cause.NUMERICS,
    ),
    Row(
        "tensor parallel: rank 1's NaN reached rank 0 through an activation all-reduce",
        Round(2, 3).wire(1, of=TENSOR_PARALLEL, raw=None).reduced(of=TENSOR_PARALLEL).raw(0, 1),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (1,),
        Cause.NUMERICS,
    ),
    Row(
        "tensor parallel within data parallel: the receiver's gradients go on into the data-parallel group",
        Round(4, 3)
        .wire(1, of=TENSOR_PARALLEL, raw=None)
        .reduced(of=TENSOR_PARALLEL)
        .loss(0, 1)
        .nan_gradient(0, 1, of=collective(group="dp", index=2)),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (1,),
        Cause.DATA,
    ),
    Row(
        "an activation that came in nonfinite after the rank's own NaN excuses nothing",
        Round(2, 3).loss(0).reduced(0, of=ACTIVATION).raw(0),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (0,),
        Cause.DATA,
    ),
    Row(
        "reports of the innocent rank are missing, the guilty one's are here",
        Round(2, 3).nan_gradient(1).unclosed(0),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (1,),
        Cause.NUMERICS,
        missing=(0,),
    ),
]

REDUCTION_ROWS = [
    Row(
        "an activation all-reduce of finite inputs returned NaN",
        Round(2, 3).reduced(of=ACTIVATION).raw(0, 1),
        "activation_reduction",
        GRADIENT,
        Stage.POST_REDUCE,
        INDUCED,
        (),
        Cause.COMMUNICATION,
    ),
    Row(
        "one rank's gradient overflowed in the cast to float16",
        Round(2, 3).wire(1, of=HALF_BUCKET, found=INF, raw=FINITE).reduced(of=HALF_BUCKET, found=INF),
        "wire_cast",
        GRADIENT,
        Stage.WIRE_CAST,
        LOCAL,
        (1,),
        Cause.COMMUNICATION,
    ),
    Row(
        "every rank's gradient overflowed in the cast",
        Round(2, 3).wire(of=HALF_BUCKET, found=INF, raw=FINITE).reduced(of=HALF_BUCKET, found=INF),
        "wire_cast",
        GRADIENT,
        Stage.WIRE_CAST,
        EVERY,
        (0, 1),
        Cause.COMMUNICATION,
    ),
    Row(
        "a narrowed later bucket is still a cast, not a fault between collectives",
        Round(2, 3).wire(1, of=collective(HALF_BUCKET, index=3), found=INF, raw=FINITE),
        "wire_cast",
        GRADIENT,
        Stage.WIRE_CAST,
        LOCAL,
        (1,),
        Cause.COMMUNICATION,
    ),
    Row(
        "compression made NaN between its two collectives, and the optimizer got it",
        Round(2, 3).wire(0, of=DERIVED, raw=FINITE).reduced(of=DERIVED).saw(Phase.APPLIED, parameters=("w",)),
        "between_collectives",
        GRADIENT,
        Stage.BETWEEN_COLLECTIVES,
        LOCAL,
        (0,),
        Cause.COMMUNICATION,
    ),
    Row(
        "a rank that only passes on what the first collective gave it is not an origin",
        Round(2, 3)
        .wire(0, of=HALF_BUCKET, found=INF, raw=FINITE)
        .reduced(of=HALF_BUCKET, found=INF)
        .wire(0, 1, of=DERIVED, found=INF, raw=FINITE)
        .saw(Phase.APPLIED),
        "wire_cast",
        GRADIENT,
        Stage.WIRE_CAST,
        LOCAL,
        (0,),
        Cause.COMMUNICATION,
    ),
    Row(
        "finite float16 gradients whose sum leaves the range",
        Round(2, 3).reduced(of=HALF_BUCKET, found=INF, absmax=40_000.0),
        "sum_overflow",
        GRADIENT,
        Stage.POST_REDUCE,
        INDUCED,
        (),
        Cause.COMMUNICATION,
    ),
    Row(
        "the same with reduce-scatter, seen by the owner of the shard alone",
        Round(4, 3).reduced(2, of=collective(SHARD, dtype="float16"), found=INF, absmax=20_000.0),
        "sum_overflow",
        GRADIENT,
        Stage.POST_REDUCE,
        INDUCED,
        (),
        Cause.COMMUNICATION,
    ),
    Row(
        "a group that is not the world sums only its own ranks",
        Round(4, 3).reduced(of=collective(RIGHT, dtype="float16"), found=INF, absmax=33_000.0),
        "sum_overflow",
        GRADIENT,
        Stage.POST_REDUCE,
        INDUCED,
        (),
        Cause.COMMUNICATION,
    ),
    Row(
        "small inputs, every rank got the same nonfinite sum",
        Round(2, 3).reduced(of=HALF_BUCKET, absmax=10.0),
        "damaged_reduction",
        Kind.BAD_REDUCTION,
        Stage.POST_REDUCE,
        INDUCED,
        (),
        Cause.COMMUNICATION,
    ),
    Row(
        "small inputs, one rank of three got a nonfinite sum",
        Round(3, 3).reduced(1, absmax=10.0),
        "damaged_reduction",
        Kind.BAD_REDUCTION,
        Stage.POST_REDUCE,
        LOCAL,
        (1,),
        Cause.COMMUNICATION,
    ),
    Row(
        "a result came back nonfinite and one rank's reports never came",
        Round(2, 3).reduced(0).unclosed(1),
        "reduced_incomplete",
        GRADIENT,
        Stage.POST_REDUCE,
        NOBODY,
        (),
        Cause.UNKNOWN,
        missing=(1,),
    ),
    Row(
        "a result came back nonfinite and the guilty rank's evidence was lost, though not its closing record",
        Round(2, 3).nan_gradient(1).lost(1, 0, 1),
        "reduced_incomplete",
        GRADIENT,
        Stage.POST_REDUCE,
        NOBODY,
        (),
        Cause.UNKNOWN,
        missing=(1,),
    ),
    Row(
        "missing reports of a rank outside of the group change nothing",
        Round(4, 3).reduced(of=collective(RIGHT, dtype="float16"), found=INF, absmax=40_000.0).unclosed(0),
        "sum_overflow",
        GRADIENT,
        Stage.POST_REDUCE,
        INDUCED,
        (),
        Cause.COMMUNICATION,
        missing=(0,),
    ),
]

LOSS_ROWS = [
    Row(
        "one rank's loss was NaN and its gradients were not",
        Round(2, 3).loss(1),
        "loss_only",
        Kind.NONFINITE_LOSS,
        Stage.FORWARD,
        LOCAL,
        (1,),
        Cause.DATA,
        Severity.WARNING,
    ),
    Row(
        "every rank's loss was infinite and no gradient was",
        Round(2, 3).loss(value=float("inf")),
        "loss_only",
        Kind.NONFINITE_LOSS,
        Stage.FORWARD,
        EVERY,
        (0, 1),
        Cause.NUMERICS,
        Severity.WARNING,
    ),
    Row(
        "the script left on a NaN loss before backward",
        Round(2, 3).loss(1).saw(Phase.EXIT, 1, note="SystemExit").closed(ClosedBy.EXIT),
        "loss_only",
        Kind.NONFINITE_LOSS,
        Stage.FORWARD,
        LOCAL,
        (1,),
        Cause.DATA,
        Severity.WARNING,
    ),
    Row(
        "with no backward, a NaN that a rank reduced as a scalar stands in for its loss",
        Round(2, 3).wire(1, of=SCALAR, raw=None).reduced(of=SCALAR).closed(ClosedBy.FRAMEWORK_SKIPPED, skipped=True),
        "loss_only",
        Kind.NONFINITE_LOSS,
        Stage.FORWARD,
        LOCAL,
        (1,),
        Cause.DATA,
        Severity.WARNING,
    ),
    Row(
        "with no backward, a nonfinite root output stands in for the loss",
        Round(2, 3).saw(Phase.OUTPUT, 0).closed(ClosedBy.EXIT),
        "loss_only",
        Kind.NONFINITE_LOSS,
        Stage.FORWARD,
        LOCAL,
        (0,),
        Cause.DATA,
        Severity.WARNING,
    ),
    Row(
        "a loss with derived values that reached no gradient is a loss alone",
        Round(2, 3).loss(1).reduced(of=DERIVED),
        "loss_only",
        Kind.NONFINITE_LOSS,
        Stage.FORWARD,
        LOCAL,
        (1,),
        Cause.DATA,
        Severity.WARNING,
    ),
]

SCALER_ROWS = [
    Row(
        "in mid-run, NaN with no inf anywhere is not what too large a scale makes",
        Round(2, 9).nan_gradient(1).scaler_skip(),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (1,),
        Cause.NUMERICS,
        scaler=STEPPED,
    ),
    Row(
        "a search that has not ended after twenty skips is no search",
        Round(2, 30).nan_gradient(1, found=INF).scaler_skip(0.0625),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (1,),
        Cause.NUMERICS,
        scaler=ScalerHistory(consecutive_skips=MAX_CONSECUTIVE_SKIPS),
    ),
    Row(
        "a scaler's skip with a nonfinite loss is not the scale's doing, even at the start",
        Round(2, 0).loss(1).nan_gradient(1, found=INF).scaler_skip(65536.0),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (1,),
        Cause.DATA,
    ),
    Row(
        "nonfinite weights at the start are never a search",
        Round(2, 0).saw(Phase.INIT).nan_gradient(0, 1).scaler_skip(65536.0),
        "parameters_at_start",
        Kind.NONFINITE_PARAMETERS,
        Stage.INIT_WEIGHTS,
        EVERY,
        (0, 1),
        Cause.FRAMEWORK,
    ),
    Row(
        "a step taken with infinite gradients is an incident, scaler or not",
        Round(2, 0).nan_gradient(1, found=INF).closed(loss_scale=65536.0),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (1,),
        Cause.NUMERICS,
    ),
    Row(
        "a framework's own skip with no scaler is an incident",
        Round(2, 0).nan_gradient(1, found=INF).closed(ClosedBy.FRAMEWORK_SKIPPED, skipped=True),
        "raw_gradient",
        GRADIENT,
        Stage.PRE_REDUCE,
        LOCAL,
        (1,),
        Cause.NUMERICS,
    ),
]

ROWS = [*PARAMETER_ROWS, *RAW_ROWS, *REDUCTION_ROWS, *LOSS_ROWS, *SCALER_ROWS]

QUIET_ROWS = [
    ("the scaler's first scale is too high", Round(2, 0).nan_gradient(1, found=INF).scaler_skip(65536.0), None),
    ("at the start even NaN may come of the scale", Round(2, 0).nan_gradient(1).scaler_skip(65536.0), None),
    ("the scale grew since the last step", Round(2, 9).nan_gradient(0).scaler_skip(2048.0), STEPPED),
    ("in mid-run one value overflowed to inf", Round(2, 9).nan_gradient(1, found=INF).scaler_skip(1024.0), STEPPED),
    (
        "in mid-run the scaled sum overflowed in the reduction",
        Round(2, 9).reduced(of=HALF_BUCKET, found=INF, absmax=40_000.0).scaler_skip(1024.0),
        STEPPED,
    ),
    (
        "the search goes on over several skips",
        Round(2, 1).nan_gradient(0).scaler_skip(32768.0),
        ScalerHistory(consecutive_skips=1),
    ),
    (
        "one skip fewer than a search can need",
        Round(2, 19).nan_gradient(0).scaler_skip(0.125),
        ScalerHistory(consecutive_skips=MAX_CONSECUTIVE_SKIPS - 1),
    ),
]

UNCONFIRMED_ROWS = [
    ("an activation reduction was nonfinite and nothing followed", Round(2, 3).reduced(of=ACTIVATION)),
    (
        "a derived value was nonfinite and no gradient was",
        Round(2, 3).wire(0, of=DERIVED, raw=FINITE).reduced(of=DERIVED),
    ),
    ("a norm was nonfinite and the optimizer stepped", Round(2, 3).wire(0, of=SCALAR, raw=None).reduced(of=SCALAR)),
    ("an output was nonfinite that no loss used", Round(2, 3).saw(Phase.OUTPUT, 0)),
    ("a rank left with nothing nonfinite", Round(2, 3).saw(Phase.EXIT, 1, note="SystemExit").closed(ClosedBy.EXIT)),
]


def verdict_of(told: Round, scaler: ScalerHistory | None = None) -> Verdict:
    """The verdict of a round that must have one."""
    outcome = classify(told.view(scaler))
    assert isinstance(outcome, Verdict), outcome
    return outcome


@pytest.mark.parametrize("row", ROWS, ids=[row.sentence for row in ROWS])
def test_each_story_gets_its_verdict(row: Row) -> None:
    """Rule, kind, stage, attribution, suspects, cause, severity and missing ranks are what the row says."""
    verdict = verdict_of(row.told, row.scaler)
    seen = (verdict.rule, verdict.kind, verdict.stage, verdict.attribution, verdict.suspect_ranks)
    assert seen == (row.rule, row.kind, row.stage, row.attribution, row.suspects)
    assert (verdict.cause, verdict.severity, verdict.missing_ranks) == (row.cause, row.severity, row.missing)


@pytest.mark.parametrize("row", ROWS, ids=[row.sentence for row in ROWS])
def test_each_reason_is_one_readable_line(row: Row) -> None:
    """A reason is one line of text that names every rank it accuses and says what is missing."""
    reason = verdict_of(row.told, row.scaler).reason
    assert reason.isprintable()
    assert all(str(rank) in reason for rank in (*row.suspects, *row.missing))
    assert ("missing" in reason) is bool(row.missing)


@pytest.mark.parametrize(("sentence", "told", "scaler"), QUIET_ROWS, ids=[row[0] for row in QUIET_ROWS])
def test_ordinary_skips_of_the_scaler_are_quiet(sentence: str, told: Round, scaler: ScalerHistory | None) -> None:
    """A skip that the search for a scale explains raises no incident, for a named reason."""
    assert classify(told.view(scaler)) is Quiet.SCALER_SEARCH


@pytest.mark.parametrize(("sentence", "told"), UNCONFIRMED_ROWS, ids=[row[0] for row in UNCONFIRMED_ROWS])
def test_what_reaches_no_gradient_loss_or_parameter_is_quiet(sentence: str, told: Round) -> None:
    """Nonfinite values that went nowhere raise no incident, for a named reason."""
    assert classify(told.view()) is Quiet.NOTHING_CONFIRMED


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (Round(2).saw(Phase.INIT, 0), Round(2).nan_gradient(1)),
        (Round(2, 5).saw(Phase.PARAMS, 0), Round(2).nan_gradient(1)),
        (Round(2).nan_gradient(1), Round(2).wire(0, of=collective(HALF_BUCKET, index=1), found=INF, raw=FINITE)),
        (Round(2).wire(0, of=HALF_BUCKET, found=INF, raw=FINITE), Round(2).reduced(of=collective(index=1))),
        (Round(2).reduced(of=HALF_BUCKET, found=INF, absmax=40_000.0), Round(2).loss(0)),
    ],
    ids=["init before raw", "params before raw", "raw before cast", "cast before reduced", "reduced before loss"],
)
def test_the_earlier_stage_wins(earlier: Round, later: Round) -> None:
    """Where a round shows two faults, the verdict is that of the stage a value passes first."""
    expected = verdict_of(earlier)
    both = Round(2, earlier.number)
    for told in (earlier, later):
        for one in told.evidence():
            fields = {"value": one.value, "collective": one.collective, "parameters": one.parameters}
            both.saw(one.phase, one.rank, found=one.check, **fields)
    assert verdict_of(both).rule == expected.rule


def test_a_view_of_a_round_without_evidence_is_quiet() -> None:
    """Nothing seen, nothing said."""
    assert classify(Round(2).view()) is Quiet.NOTHING_CONFIRMED


def test_every_rule_has_a_row() -> None:
    """A rule that no row names is a rule nobody tells a story about."""
    told = {row.rule for row in ROWS}
    named_by_function = {rule.__name__ for rule in RULES} & told
    outcomes = {
        "scaler_search": bool(QUIET_ROWS),
        "wire_value": {"wire_cast", "between_collectives"} <= told,
        "reduced_value": {"sum_overflow", "damaged_reduction", "reduced_incomplete"} <= told,
    }
    assert [r.__name__ for r in RULES if r.__name__ not in named_by_function and not outcomes.get(r.__name__)] == []


def test_the_reason_of_a_local_fault_clears_the_others() -> None:
    """The reader of a rank-local verdict learns who contributed finite gradients, and which parameters it was."""
    told = Round(2, 3).loss(1).wire(1, parameters=("head.weight", "head.bias")).reduced()
    verdict = verdict_of(told)
    assert "rank 0 contributed finite gradients" in verdict.reason
    assert "head.weight and 1 other parameter" in verdict.reason
    assert verdict.parameters == ("head.weight", "head.bias")


def test_ranks_with_missing_reports_are_not_cleared() -> None:
    """Nobody is called innocent whose reports did not come."""
    assert "contributed finite" not in verdict_of(Round(2, 3).nan_gradient(1).unclosed(0)).reason


def test_a_sum_overflow_names_the_bound_and_the_limit() -> None:
    """The numbers that make it an overflow are in the reason: the bound on the sum and the dtype's maximum."""
    reason = verdict_of(Round(2, 3).reduced(of=HALF_BUCKET, found=INF, absmax=40_000.0)).reason
    assert "8e+04" in reason
    assert "65504" in reason


def test_findings_put_the_suspects_first() -> None:
    """The evidence kept with the verdict begins with the accused rank's, and names op and parameters."""
    first = verdict_of(Round(2, 3).nan_gradient(1, of=BUCKET, found=NAN)).findings[0]
    assert (first.rank, first.phase, first.op, first.nan) == (1, "wire", "allreduce_", 3)


@pytest.mark.xfail(strict=True, reason="raw_gradient calls every rank outside the suspects innocent, receivers too")
def test_a_receiver_is_not_said_to_have_contributed_finite_gradients() -> None:
    """Tensor parallel: rank 0 is no suspect, yet its gradients were nonfinite, and the reason must not deny it."""
    told = Round(2, 3).wire(1, of=TENSOR_PARALLEL, raw=None).reduced(of=TENSOR_PARALLEL).raw(0, 1)
    assert "rank 0 contributed finite gradients" not in verdict_of(told).reason


@pytest.mark.xfail(strict=True, reason="activation_reduction does not look whether somebody gave the collective NaN")
def test_a_rank_that_fed_nan_to_an_activation_reduction_is_the_suspect() -> None:
    """Rank 1 gave NaN activations and left before its backward; rank 0's gradients are not the reduction's fault."""
    told = Round(2, 3).wire(1, of=TENSOR_PARALLEL, raw=None).reduced(of=TENSOR_PARALLEL).raw(0)
    verdict = verdict_of(told.closed(ClosedBy.EXIT, 1))
    assert verdict.rule != "activation_reduction"
    assert verdict.suspect_ranks in ((1,), ())


@pytest.mark.xfail(strict=True, reason="activation_reduction says 'finite inputs' of ranks whose evidence is missing")
def test_an_activation_reduction_with_missing_reports_is_incomplete() -> None:
    """Whether the inputs were finite cannot be known while a rank's evidence is missing, so no verdict may claim it."""
    told = Round(2, 3).wire(1, of=TENSOR_PARALLEL, raw=None).reduced(of=TENSOR_PARALLEL).raw(0, 1).lost(1, 0)
    verdict = verdict_of(told)
    assert verdict.attribution is not Attribution.REDUCTION_INDUCED


@pytest.mark.xfail(strict=True, reason="received_through_activation ignores a hole at the head of a rank's evidence")
def test_a_rank_whose_first_evidence_was_lost_is_not_accused_of_it() -> None:
    """What rank 0 met first is lost, so whether it is origin or receiver is not known; rank 1 is still the origin."""
    told = Round(2, 3).wire(1, of=TENSOR_PARALLEL, raw=None).reduced(of=TENSOR_PARALLEL).raw(0, 1).lost(0, 0)
    assert verdict_of(told).suspect_ranks == (1,)


@pytest.mark.xfail(strict=True, reason="wire_origins ignores a hole in a rank's evidence")
def test_a_rank_that_passes_on_is_not_accused_when_what_it_received_was_lost() -> None:
    """Rank 1 only passed on the first collective's result; losing that evidence must not make it an origin."""
    told = Round(2, 3).wire(0, of=HALF_BUCKET, found=INF, raw=FINITE).reduced(of=HALF_BUCKET, found=INF)
    told.wire(0, 1, of=DERIVED, found=INF, raw=FINITE).saw(Phase.APPLIED).lost(1, 0)
    assert verdict_of(told).suspect_ranks == (0,)


@pytest.mark.xfail(strict=True, reason="sum_may_overflow counts unreported inputs as the largest reported one")
def test_the_owner_of_a_shard_is_not_accused_while_other_inputs_are_unknown() -> None:
    """Reduce-scatter: rank 0 gave 60,000 and saw no result of its own; the owner's small input bounds nothing."""
    verdict = verdict_of(Round(2, 3).reduced(1, of=collective(SHARD, dtype="float16"), found=INF, absmax=6_000.0))
    assert verdict.suspect_ranks == ()


@pytest.mark.xfail(strict=True, reason="same_collective pairs by group name and index only")
def test_groups_of_one_name_and_other_ranks_are_not_one_collective() -> None:
    """Two groups may carry one name on different ranks; only the overflowing one's inputs count."""
    left, right = (collective(HALF_BUCKET, group="1", ranks=ranks) for ranks in ((0, 1), (2, 3)))
    told = Round(4, 3).reduced(of=left, found=INF, absmax=60_000.0).reduced(of=right, found=INF, absmax=10.0)
    assert verdict_of(told).rule == "sum_overflow"


@pytest.mark.xfail(strict=True, reason="parameters_after_step speaks of a step before round 0")
def test_parameters_nonfinite_in_round_0_are_not_blamed_on_a_step() -> None:
    """There was no step before round 0, so the reason must not name one."""
    assert "step before" not in verdict_of(Round(2, 0).saw(Phase.PARAMS, 0)).reason


@pytest.mark.xfail(strict=True, reason="wire_value takes raw=None (nobody could look) for finite gradients")
def test_gradients_that_nobody_could_look_at_are_not_called_finite() -> None:
    """Nonfinite on a wire as wide as the gradients, and no look at the gradients: a cast cannot have done it."""
    verdict = verdict_of(Round(2, 3).wire(1, raw=None).reduced())
    assert (verdict.stage, verdict.suspect_ranks) == (Stage.PRE_REDUCE, (1,))
