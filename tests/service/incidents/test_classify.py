"""The rules: one row per story, evidence in, verdict out."""

from __future__ import annotations

import dataclasses

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
    Round,
    collective,
    verdict_of,
)
from service.incidents.stories import DECIDES, EVERY, LOCAL, STORIES, Row

from sentinel.incidents.classify import RULES, Quiet, classify
from sentinel.incidents.model import Cause, Verdict
from sentinel.incidents.scaler import MAX_CONSECUTIVE_SKIPS, ScalerHistory
from sentinel.wire.messages import ClosedBy, Phase

STEPPED = ScalerHistory(last_step_scale=1024.0, searching=False)

SCALER_ROWS = [
    Row(
        "in mid-run, NaN with no inf anywhere is not what too large a scale makes",
        Round(2, 9).nan_gradient(1).scaler_skip(),
        "raw_gradient",
        LOCAL,
        (1,),
        Cause.NUMERICS,
        scaler=STEPPED,
    ),
    Row(
        "a scaler's skip with a nonfinite loss is not the scale's doing, even at the start",
        Round(2, 0).loss(1).nan_gradient(1, found=INF).scaler_skip(65536.0),
        "raw_gradient",
        LOCAL,
        (1,),
        Cause.DATA,
    ),
    Row(
        "nonfinite weights at the start are never a search",
        Round(2, 0).saw(Phase.INIT).nan_gradient(0, 1).scaler_skip(65536.0),
        "parameters_at_start",
        EVERY,
        (0, 1),
        Cause.FRAMEWORK,
    ),
    Row(
        "a step taken with infinite gradients is an incident, scaler or not",
        Round(2, 0).nan_gradient(1, found=INF).closed(loss_scale=65536.0),
        "raw_gradient",
        LOCAL,
        (1,),
        Cause.NUMERICS,
    ),
    Row(
        "a framework's own skip with no scaler is an incident",
        Round(2, 0).nan_gradient(1, found=INF).closed(ClosedBy.FRAMEWORK_SKIPPED, skipped=True),
        "raw_gradient",
        LOCAL,
        (1,),
        Cause.NUMERICS,
    ),
]

BUFFER_ROWS = [
    Row(
        "the statistics of one rank's BatchNorm overflowed, and its loss did not",
        Round(2, 3).saw(Phase.BUFFERS, 1, parameters=("norm.running_var",)),
        "buffers",
        LOCAL,
        (1,),
        Cause.DATA,
    ),
]

ROWS = [*STORIES, *SCALER_ROWS, *BUFFER_ROWS]

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


@pytest.mark.parametrize("row", ROWS, ids=[row.sentence for row in ROWS])
def test_each_story_gets_its_verdict(row: Row) -> None:
    """Rule, kind, stage, attribution, suspects, cause, severity and missing ranks are what the row says."""
    verdict = verdict_of(row.told, row.scaler)
    kind, stage, severity = DECIDES[row.rule]
    assert (verdict.rule, verdict.attribution, verdict.suspect_ranks) == (row.rule, row.attribution, row.suspects)
    assert (verdict.kind, verdict.stage, verdict.severity) == (kind, row.stage or stage, severity)
    assert (verdict.cause, verdict.missing_ranks) == (row.cause, row.missing)


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


def test_an_output_of_a_skipped_round_stands_in_for_no_loss() -> None:
    """A backward followed, so the loss itself was looked at and was finite."""
    assert classify(Round(2, 9).saw(Phase.OUTPUT, 0).scaler_skip().view(STEPPED)) is Quiet.NOTHING_CONFIRMED


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


def test_skips_beyond_a_search_are_told_as_the_collapse_alone() -> None:
    """After twenty skips in a row rule 15 tells the collapse; each further skip is not a fault of its own."""
    told = Round(2, 30).nan_gradient(1, found=INF).scaler_skip(0.0625)
    assert classify(told.view(ScalerHistory(consecutive_skips=MAX_CONSECUTIVE_SKIPS))) is Quiet.SCALER_COLLAPSED


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


@pytest.mark.parametrize("told", [Round(2, 3).loss(), Round(2, 3).nan_gradient(0, 1)], ids=["loss", "gradients"])
def test_a_loss_that_grew_before_it_broke_points_at_the_optimization(told: Round) -> None:
    """All ranks at once after a growing loss: a learning rate too high rather than the arithmetic."""
    grown = dataclasses.replace(told.view(), losses_grew=True)
    assert [verdict.cause for view in (told.view(), grown) if isinstance(verdict := classify(view), Verdict)] == [
        Cause.NUMERICS,
        Cause.OPTIMIZATION,
    ]


def test_parameters_are_named_by_the_applied_gradients_where_the_wire_has_no_names() -> None:
    """A compressed buffer is nobody's parameter; what the optimizer was about to apply has names."""
    told = Round(2, 3).wire(0, of=DERIVED, raw=FINITE, parameters=()).saw(Phase.APPLIED, parameters=("head.weight",))
    verdict = verdict_of(told)
    assert verdict.parameters == ("head.weight",)
    assert "head.weight" in verdict.reason


def test_nonfinite_buffers_are_never_a_search() -> None:
    """The loss scale does not touch the forward: BatchNorm keeps this NaN whether the step is skipped or not."""
    told = Round(2, 0).saw(Phase.BUFFERS, 1).nan_gradient(1, found=INF).scaler_skip(65536.0)
    assert isinstance(classify(told.view()), Verdict)


def test_a_sum_overflow_names_the_bound_and_the_limit() -> None:
    """The numbers that make it an overflow are in the reason: the bound on the sum and the dtype's maximum."""
    reason = verdict_of(Round(2, 3).reduced(of=HALF_BUCKET, found=INF, absmax=40_000.0)).reason
    assert "8e+04" in reason
    assert "65504" in reason


def test_findings_put_the_suspects_first() -> None:
    """The evidence kept with the verdict begins with the accused rank's, and names op and parameters."""
    first = verdict_of(Round(2, 3).nan_gradient(1, of=BUCKET, found=NAN)).findings[0]
    assert (first.rank, first.phase, first.op, first.nan) == (1, "wire", "allreduce_", 3)
