"""The table of rules: what each verdict says, for people and for the documents.

Owns the published table and nothing that decides; a test holds every rule to its row, and every row to a rule. The order is that
of judgement within a round.
"""

from __future__ import annotations

from dataclasses import dataclass

from sentinel.incidents.model import Kind, Severity, Stage


@dataclass(frozen=True, slots=True)
class Row:
    """One rule: what must be seen, and what it concludes. ``suspects`` says whom it names."""

    rule: str
    seen: str
    kind: Kind | None
    stage: Stage | None
    suspects: str
    severity: Severity | None


NOBODY = "nobody: the reduction made it"
WHERE_SEEN = "ranks where it was seen"
WHOSE_OWN = "ranks where it was seen, less those that another rank handed it to"
_K, _S, _C, _W = Kind, Stage, Severity.CRITICAL, Severity.WARNING

TABLE: tuple[Row, ...] = (
    Row(
        "scaler_search",
        "GradScaler skips, loss finite, in search of its scale (or inf, now and then)",
        None,
        None,
        "-",
        None,
    ),
    Row("scaler_collapsed", "one more skip of a scaler whose collapse was told", None, None, "-", None),
    Row(
        "parameters_at_start",
        "parameters nonfinite before the first forward",
        _K.NONFINITE_PARAMETERS,
        _S.INIT_WEIGHTS,
        WHOSE_OWN,
        _C,
    ),
    Row(
        "buffers_at_start",
        "buffers that held NaN before the first forward, whose loss or gradients are nonfinite",
        _K.NONFINITE_BUFFERS,
        _S.INIT_WEIGHTS,
        WHOSE_OWN,
        _C,
    ),
    Row(
        "parameters_written",
        "parameters nonfinite at a round's start, written by something else since the last step",
        _K.NONFINITE_PARAMETERS,
        _S.PARAMS,
        WHOSE_OWN,
        _C,
    ),
    Row(
        "parameters_after_step",
        "parameters nonfinite at a round's start, no earlier incident",
        _K.NONFINITE_PARAMETERS,
        _S.OPTIMIZER,
        WHOSE_OWN,
        _C,
    ),
    Row(
        "raw_gradient",
        "autograd's own gradients nonfinite on some ranks",
        _K.NONFINITE_GRADIENT,
        _S.PRE_REDUCE,
        "those ranks, receivers of activations left out",
        _C,
    ),
    Row(
        "given_to_activation",
        "nonfinite activations given to a reduction, gradients follow",
        _K.NONFINITE_GRADIENT,
        _S.PRE_REDUCE,
        "the ranks that gave them",
        _C,
    ),
    Row(
        "activation_reduction",
        "an activation reduction returned nonfinite for finite inputs",
        _K.NONFINITE_GRADIENT,
        _S.POST_REDUCE,
        NOBODY,
        _C,
    ),
    Row(
        "wire_cast",
        "gradients finite, the collective's input not",
        _K.NONFINITE_GRADIENT,
        _S.WIRE_CAST,
        "ranks whose input it was",
        _C,
    ),
    Row(
        "between_collectives",
        "the same, after an earlier collective of the round, with no narrower dtype",
        _K.NONFINITE_GRADIENT,
        _S.BETWEEN_COLLECTIVES,
        "ranks whose input it was",
        _C,
    ),
    Row(
        "sum_overflow",
        "every input finite, the result not, and the sum can leave the dtype's range",
        _K.NONFINITE_GRADIENT,
        _S.POST_REDUCE,
        NOBODY,
        _C,
    ),
    Row(
        "damaged_reduction",
        "the same, but the sum cannot leave the range",
        _K.BAD_REDUCTION,
        _S.POST_REDUCE,
        "ranks whose result differs, or nobody",
        _C,
    ),
    Row(
        "reduced_incomplete",
        "a nonfinite result, and reports of its group are missing",
        _K.NONFINITE_GRADIENT,
        _S.POST_REDUCE,
        "nobody: it cannot be told",
        _C,
    ),
    Row(
        "rewritten_gradient",
        "reduced to finite gradients, nonfinite when applied: the script has written them in between",
        _K.NONFINITE_GRADIENT,
        _S.POST_REDUCE,
        WHERE_SEEN,
        _C,
    ),
    Row("loss_only", "the loss nonfinite, gradients finite", _K.NONFINITE_LOSS, _S.FORWARD, WHERE_SEEN, _W),
    Row("buffers", "buffers became nonfinite, loss and gradients not", _K.NONFINITE_BUFFERS, _S.FORWARD, WHOSE_OWN, _C),
    Row(
        "mismatched_collectives",
        "collective k covers different parameters on different ranks",
        _K.BAD_REDUCTION,
        _S.POST_REDUCE,
        "the minority; both of two",
        _C,
    ),
    Row(
        "unequal_results",
        "an all-reduce returned different values on its ranks",
        _K.BAD_REDUCTION,
        _S.POST_REDUCE,
        "the minority; both of two",
        _C,
    ),
    Row(
        "result_is_not_the_sum",
        "an all-reduce's result is not the sum of its inputs",
        _K.BAD_REDUCTION,
        _S.POST_REDUCE,
        "nobody: it cannot be told",
        _C,
    ),
    Row(
        "stale_gradient",
        "a contribution that no backward of the round produced",
        _K.BAD_REDUCTION,
        _S.PRE_REDUCE,
        "that rank",
        _C,
    ),
    Row(
        "weights_differ_at_start",
        "parameters that are reduced together differ at the start",
        _K.REPLICA_DIVERGENCE,
        _S.INIT_WEIGHTS,
        "the minority; both of two",
        _C,
    ),
    Row(
        "not_reduced",
        "equal replicas drift apart by gradients that nobody reduced",
        _K.REPLICA_DIVERGENCE,
        _S.NOT_REDUCED,
        "the minority; both of two",
        _C,
    ),
    Row(
        "weights_differ",
        "equal replicas drift apart though their reduced gradients agreed",
        _K.REPLICA_DIVERGENCE,
        _S.PARAMS,
        "the minority; both of two",
        _C,
    ),
    Row(
        "step_disagreement",
        "some ranks stepped, others left the step out",
        _K.STEP_DISAGREEMENT,
        _S.OPTIMIZER,
        "the minority; both of two",
        _C,
    ),
    Row(
        "scaler_collapse",
        "scale below one, or twenty skips in a row",
        _K.SCALER_COLLAPSE,
        _S.PRE_REDUCE,
        "all ranks",
        _C,
    ),
    Row(
        "zero_gradients",
        "every gradient exactly zero from the first round on",
        _K.STALLED_TRAINING,
        _S.PRE_REDUCE,
        "all ranks",
        _W,
    ),
    Row(
        "unmoved_weights",
        "steps with gradients that are not zero, and not one bit of any weight changed since the training began",
        _K.STALLED_TRAINING,
        _S.OPTIMIZER,
        "all ranks",
        _W,
    ),
    Row(
        "norm_overflow",
        "the clipping norm nonfinite though every gradient is finite",
        _K.STALLED_TRAINING,
        _S.OPTIMIZER,
        WHERE_SEEN,
        _W,
    ),
    Row(
        "second_moment_overflow",
        "squares of finite gradients overflowed in the optimizer's state (Adam, RMSprop, Adagrad)",
        _K.STALLED_TRAINING,
        _S.OPTIMIZER,
        WHERE_SEEN,
        _W,
    ),
    Row(
        "silent_overflow",
        "an intermediate overflowed its half precision and was absorbed (only where the audit is on)",
        _K.SILENT_OVERFLOW,
        _S.FORWARD,
        WHERE_SEEN,
        _W,
    ),
    Row(
        "rank_silent",
        "nothing heard of a rank for two minutes, or it raised so long ago, while at least as many others are there",
        _K.RANK_SILENT,
        _S.NONE,
        "those ranks",
        _W,
    ),
    Row("clip_before_unscale", "clipping of scaled gradients", _K.MISUSE, _S.OPTIMIZER, WHERE_SEEN, _W),
    Row("step_without_unscale", "a step on scaled gradients", _K.MISUSE, _S.OPTIMIZER, WHERE_SEEN, _W),
    Row(
        "scale_changed_before_step",
        "scaler.update between a backward and its step",
        _K.MISUSE,
        _S.OPTIMIZER,
        WHERE_SEEN,
        _W,
    ),
    Row(
        "used_under_way",
        "gradients used before their all-reduce was waited for",
        _K.MISUSE,
        _S.OPTIMIZER,
        WHERE_SEEN,
        _W,
    ),
    Row("scaler_with_bfloat16", "a GradScaler under bfloat16 autocast", _K.MISUSE, _S.OPTIMIZER, WHERE_SEEN, _W),
)
