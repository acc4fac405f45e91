"""The table of stories: what ranks saw in one round, and the verdict that the rules must give.

Owns the rows; ``test_classify.py`` holds the rules to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.incidents.rounds import (
    ACTIVATION,
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

from sentinel.incidents.model import Attribution, Cause, Kind, Severity, Stage
from sentinel.incidents.scaler import ScalerHistory
from sentinel.wire.messages import AT_START, CHAINED, HANDED, REWRITTEN, WRITTEN, ClosedBy, Phase

LEFT = collective(group="left", ranks=(0, 1))
RIGHT = collective(group="right", ranks=(2, 3))
TENSOR_PARALLEL = collective(ACTIVATION, group="tp", ranks=(0, 1))

GRADIENT = Kind.NONFINITE_GRADIENT
DECIDES = {
    "parameters_at_start": (Kind.NONFINITE_PARAMETERS, Stage.INIT_WEIGHTS, Severity.CRITICAL),
    "buffers_at_start": (Kind.NONFINITE_BUFFERS, Stage.INIT_WEIGHTS, Severity.CRITICAL),
    "parameters_written": (Kind.NONFINITE_PARAMETERS, Stage.PARAMS, Severity.CRITICAL),
    "parameters_after_step": (Kind.NONFINITE_PARAMETERS, Stage.OPTIMIZER, Severity.CRITICAL),
    "raw_gradient": (GRADIENT, Stage.PRE_REDUCE, Severity.CRITICAL),
    "activation_reduction": (GRADIENT, Stage.POST_REDUCE, Severity.CRITICAL),
    "wire_cast": (GRADIENT, Stage.WIRE_CAST, Severity.CRITICAL),
    "between_collectives": (GRADIENT, Stage.BETWEEN_COLLECTIVES, Severity.CRITICAL),
    "sum_overflow": (GRADIENT, Stage.POST_REDUCE, Severity.CRITICAL),
    "damaged_reduction": (Kind.BAD_REDUCTION, Stage.POST_REDUCE, Severity.CRITICAL),
    "reduced_incomplete": (GRADIENT, Stage.POST_REDUCE, Severity.CRITICAL),
    "buffers": (Kind.NONFINITE_BUFFERS, Stage.FORWARD, Severity.CRITICAL),
    "rewritten_gradient": (GRADIENT, Stage.POST_REDUCE, Severity.CRITICAL),
    "loss_only": (Kind.NONFINITE_LOSS, Stage.FORWARD, Severity.WARNING),
}
"""Kind, stage and severity that each rule's verdict has."""


@dataclass(frozen=True)
class Row:
    """One story and the verdict it must get; ``stage`` only where it is not the rule's usual one."""

    sentence: str
    told: Round
    rule: str
    attribution: Attribution
    suspects: tuple[int, ...]
    cause: Cause
    stage: Stage | None = None
    scaler: ScalerHistory | None = None
    missing: tuple[int, ...] = ()


LOCAL, MULTI, EVERY = Attribution.RANK_LOCAL, Attribution.MULTI_RANK, Attribution.ALL_RANKS
INDUCED, NOBODY = Attribution.REDUCTION_INDUCED, Attribution.NONE

PARAMETER_ROWS = [
    Row(
        "one rank started from nonfinite weights",
        Round(2).saw(Phase.INIT, 1, parameters=("w",)).nan_gradient(0, 1),
        "parameters_at_start",
        LOCAL,
        (1,),
        Cause.FRAMEWORK,
    ),
    Row(
        "every rank loaded the same broken checkpoint",
        Round(3).saw(Phase.INIT, parameters=("w", "b")),
        "parameters_at_start",
        EVERY,
        (0, 1, 2),
        Cause.FRAMEWORK,
    ),
    Row(
        "one rank loaded a broken checkpoint, which DDP gave to all",
        Round(2).saw(Phase.INIT, 0, parameters=("w",)).saw(Phase.INIT, 1, parameters=("w",), note=HANDED),
        "parameters_at_start",
        LOCAL,
        (0,),
        Cause.FRAMEWORK,
    ),
    Row(
        "rank 0's part of the job is not watched, and what it handed round was broken",
        Round(2).saw(Phase.INIT, 1, parameters=("w",), note=HANDED),
        "parameters_at_start",
        LOCAL,
        (1,),
        Cause.FRAMEWORK,
    ),
    Row(
        "two ranks began with NaN in a buffer, which one of them got from the other",
        Round(2)
        .loss()
        .saw(Phase.BUFFERS, 0, parameters=("shift",), note=AT_START)
        .saw(Phase.BUFFERS, 1, parameters=("shift",), note=HANDED)
        .nan_gradient(0, 1),
        "buffers_at_start",
        LOCAL,
        (0,),
        Cause.FRAMEWORK,
    ),
    Row(
        "one rank began with NaN in a buffer, which DDP gave to all",
        Round(2).loss().saw(Phase.BUFFERS, 0, parameters=("shift",), note=AT_START).nan_gradient(0, 1),
        "buffers_at_start",
        LOCAL,
        (0,),
        Cause.FRAMEWORK,
    ),
    Row(
        "one rank loaded a broken checkpoint in the middle of its training",
        Round(2, 5).loss(1).nan_gradient(1).saw(Phase.PARAMS, 1, parameters=("w",), note=WRITTEN),
        "parameters_written",
        LOCAL,
        (1,),
        Cause.FRAMEWORK,
    ),
    Row(
        "the step before left nonfinite parameters on every rank",
        Round(2, 5).loss().nan_gradient(0, 1).saw(Phase.PARAMS, parameters=("w",)),
        "parameters_after_step",
        EVERY,
        (0, 1),
        Cause.OPTIMIZATION,
    ),
    Row(
        "one rank alone came out of the step with nonfinite parameters",
        Round(3, 5).loss(2).nan_gradient(2).saw(Phase.PARAMS, 2),
        "parameters_after_step",
        LOCAL,
        (2,),
        Cause.OPTIMIZATION,
    ),
    Row(
        "nonfinite parameters in round 0 cannot be a step's doing",
        Round(2, 0).saw(Phase.PARAMS, 0),
        "parameters_after_step",
        LOCAL,
        (0,),
        Cause.OPTIMIZATION,
        stage=Stage.PARAMS,
    ),
]

RAW_ROWS = [
    Row(
        "one rank's gradients were NaN though its loss was finite",
        Round(2, 3).nan_gradient(1),
        "raw_gradient",
        LOCAL,
        (1,),
        Cause.NUMERICS,
    ),
    Row(
        "one rank's loss was NaN and so were its gradients",
        Round(2, 3).loss(1).nan_gradient(1),
        "raw_gradient",
        LOCAL,
        (1,),
        Cause.DATA,
    ),
    Row(
        "two of four ranks had NaN gradients",
        Round(4, 3).nan_gradient(1, 3),
        "raw_gradient",
        MULTI,
        (1, 3),
        Cause.NUMERICS,
    ),
    Row(
        "every rank had NaN losses and gradients",
        Round(2, 3).loss().nan_gradient(0, 1),
        "raw_gradient",
        EVERY,
        (0, 1),
        Cause.NUMERICS,
    ),
    Row("the only rank of a world of one", Round(1, 3).raw(0), "raw_gradient", LOCAL, (0,), Cause.NUMERICS),
    Row(
        "a rank raised on its gradients before they were reduced",
        Round(2, 3).raw(1).saw(Phase.EXIT, 1, note="RuntimeError").closed(ClosedBy.EXIT),
        "raw_gradient",
        LOCAL,
        (1,),
        Cause.NUMERICS,
    ),
    Row(
        "reduce-scatter: rank 2 gave NaN, only the owner of the shard sees it reduced",
        Round(4, 3).wire(2, of=SHARD).reduced(0, of=SHARD),
        "raw_gradient",
        LOCAL,
        (2,),
        Cause.NUMERICS,
    ),
    Row(
        "a later bucket of the round is nonfinite, the first was fine",
        Round(2, 3).nan_gradient(0, of=collective(index=4)),
        "raw_gradient",
        LOCAL,
        (0,),
        Cause.NUMERICS,
    ),
    Row(
        "one rank of a group that is not the world",
        Round(4, 3).nan_gradient(3, of=RIGHT),
        "raw_gradient",
        LOCAL,
        (3,),
        Cause.NUMERICS,
    ),
    Row(
        "every rank of a group that is not the world",
        Round(4, 3).nan_gradient(2, 3, of=RIGHT),
        "raw_gradient",
        EVERY,
        (2, 3),
        Cause.NUMERICS,
    ),
    Row(
        "one rank in each of two groups",
        Round(4, 3).nan_gradient(1, of=LEFT).nan_gradient(2, of=RIGHT),
        "raw_gradient",
        MULTI,
        (1, 2),
        Cause.NUMERICS,
    ),
    Row(
        "tensor parallel: rank 1's NaN reached rank 0 through an activation all-reduce",
        Round(2, 3).wire(1, of=TENSOR_PARALLEL, raw=None).reduced(of=TENSOR_PARALLEL).raw(0, 1),
        "raw_gradient",
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
        LOCAL,
        (1,),
        Cause.DATA,
    ),
    Row(
        "an activation that came in nonfinite after the rank's own NaN excuses nothing",
        Round(2, 3).loss(0).reduced(0, of=ACTIVATION).raw(0),
        "raw_gradient",
        LOCAL,
        (0,),
        Cause.DATA,
    ),
    Row(
        "reports of the innocent rank are missing, the guilty one's are here",
        Round(2, 3).nan_gradient(1).unclosed(0),
        "raw_gradient",
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
        INDUCED,
        (),
        Cause.COMMUNICATION,
    ),
    Row(
        "one rank's gradient overflowed in the cast to float16",
        Round(2, 3).wire(1, of=HALF_BUCKET, found=INF, raw=FINITE).reduced(of=HALF_BUCKET, found=INF),
        "wire_cast",
        LOCAL,
        (1,),
        Cause.COMMUNICATION,
    ),
    Row(
        "every rank's gradient overflowed in the cast",
        Round(2, 3).wire(of=HALF_BUCKET, found=INF, raw=FINITE).reduced(of=HALF_BUCKET, found=INF),
        "wire_cast",
        EVERY,
        (0, 1),
        Cause.COMMUNICATION,
    ),
    Row(
        "compression made NaN before the first collective, at the gradients' own width",
        Round(2, 3).wire(1, raw=FINITE).reduced(),
        "wire_cast",
        LOCAL,
        (1,),
        Cause.COMMUNICATION,
    ),
    Row(
        "a narrowed later bucket is still a cast, not a fault between collectives",
        Round(2, 3).wire(1, of=collective(HALF_BUCKET, index=3), found=INF, raw=FINITE),
        "wire_cast",
        LOCAL,
        (1,),
        Cause.COMMUNICATION,
    ),
    Row(
        "compression made NaN between its two collectives, and the optimizer got it",
        Round(2, 3).wire(0, of=DERIVED, raw=FINITE).reduced(of=DERIVED).saw(Phase.APPLIED, parameters=("w",)),
        "between_collectives",
        LOCAL,
        (0,),
        Cause.COMMUNICATION,
    ),
    Row(
        "a communication hook made NaN of its first collective's finite result, and gave it to its second",
        Round(2, 3)
        .saw(Phase.WIRE, collective=collective(index=1, wire=NAN, raw=FINITE), note=CHAINED)
        .reduced(of=collective(index=1)),
        "between_collectives",
        EVERY,
        (0, 1),
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
        LOCAL,
        (0,),
        Cause.COMMUNICATION,
    ),
    Row(
        "finite float16 gradients whose sum leaves the range",
        Round(2, 3).reduced(of=HALF_BUCKET, found=INF, absmax=40_000.0),
        "sum_overflow",
        INDUCED,
        (),
        Cause.COMMUNICATION,
    ),
    Row(
        "the same with reduce-scatter, seen by the owner of the shard alone",
        Round(4, 3).reduced(2, of=collective(SHARD, dtype="float16"), found=INF, absmax=20_000.0),
        "sum_overflow",
        INDUCED,
        (),
        Cause.COMMUNICATION,
    ),
    Row(
        "a group that is not the world sums only its own ranks",
        Round(4, 3).reduced(of=collective(RIGHT, dtype="float16"), found=INF, absmax=33_000.0),
        "sum_overflow",
        INDUCED,
        (),
        Cause.COMMUNICATION,
    ),
    Row(
        "small inputs, every rank got the same nonfinite sum",
        Round(2, 3).reduced(of=HALF_BUCKET, absmax=10.0),
        "damaged_reduction",
        INDUCED,
        (),
        Cause.COMMUNICATION,
    ),
    Row(
        "small inputs, one rank of three got a nonfinite sum",
        Round(3, 3).reduced(1, absmax=10.0),
        "damaged_reduction",
        LOCAL,
        (1,),
        Cause.COMMUNICATION,
    ),
    Row(
        "a result came back nonfinite and one rank's reports never came",
        Round(2, 3).reduced(0).unclosed(1),
        "reduced_incomplete",
        NOBODY,
        (),
        Cause.UNKNOWN,
        missing=(1,),
    ),
    Row(
        "a result came back nonfinite and the guilty rank's evidence was lost, though not its closing record",
        Round(2, 3).nan_gradient(1).lost(1, 0, 1),
        "reduced_incomplete",
        NOBODY,
        (),
        Cause.UNKNOWN,
        missing=(1,),
    ),
    Row(
        "missing reports of a rank outside of the group change nothing",
        Round(4, 3).reduced(of=collective(RIGHT, dtype="float16"), found=INF, absmax=40_000.0).unclosed(0),
        "sum_overflow",
        INDUCED,
        (),
        Cause.COMMUNICATION,
        missing=(0,),
    ),
]

LOSS_ROWS = [
    Row(
        "every rank divided its reduced gradients by the number of tokens, which was zero",
        Round(2, 3).saw(Phase.APPLIED, note=REWRITTEN, parameters=("head.weight",)),
        "rewritten_gradient",
        EVERY,
        (0, 1),
        Cause.NUMERICS,
    ),
    Row(
        "one rank alone wrote NaN into gradients that all had reduced alike",
        Round(2, 3).saw(Phase.APPLIED, 1, note=REWRITTEN, parameters=("head.weight",)),
        "rewritten_gradient",
        LOCAL,
        (1,),
        Cause.NUMERICS,
    ),
    Row(
        "one rank's loss was NaN and its gradients were not", Round(2, 3).loss(1), "loss_only", LOCAL, (1,), Cause.DATA
    ),
    Row(
        "every rank's loss was infinite and no gradient was",
        Round(2, 3).loss(value=float("inf")),
        "loss_only",
        EVERY,
        (0, 1),
        Cause.NUMERICS,
    ),
    Row(
        "the script left on a NaN loss before backward",
        Round(2, 3).loss(1).saw(Phase.EXIT, 1, note="SystemExit").closed(ClosedBy.EXIT),
        "loss_only",
        LOCAL,
        (1,),
        Cause.DATA,
    ),
    Row(
        "with no backward, a NaN that a rank reduced as a scalar stands in for its loss",
        Round(2, 3)
        .wire(1, of=SCALAR, raw=None)
        .reduced(of=SCALAR)
        .closed(ClosedBy.FRAMEWORK_SKIPPED, skipped=True, forwards=1),
        "loss_only",
        LOCAL,
        (1,),
        Cause.DATA,
    ),
    Row(
        "with no backward, a nonfinite root output stands in for the loss",
        Round(2, 3).saw(Phase.OUTPUT, 0).closed(ClosedBy.EXIT, forwards=1),
        "loss_only",
        LOCAL,
        (0,),
        Cause.DATA,
    ),
    Row(
        "a loss with derived values that reached no gradient is a loss alone",
        Round(2, 3).loss(1).reduced(of=DERIVED),
        "loss_only",
        LOCAL,
        (1,),
        Cause.DATA,
    ),
]

STORIES = [*PARAMETER_ROWS, *RAW_ROWS, *REDUCTION_ROWS, *LOSS_ROWS]
