"""From a first bad op to a cause: is it the batch, the arithmetic, or training that has run away?

Owns the reading of one op's operands. Pure: no tensors, only what was recorded of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from sentinel.bundle.replayed import BadOp, Cause, OperandStatistics

MAXIMA: Final = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": 1.7977e308}
HUGE: Final = 1e15  # float32 activations of this size mean that training has run away
_LOSSES: Final = ("nll_loss", "cross_entropy", "binary_cross_entropy", "kl_div", "ctc_loss")
_SPREADS: Final = ("std", "var", "mean", "median")


@dataclass(frozen=True, slots=True)
class Reading:
    """What an op's operands say: a cause, a named reason, and it in words."""

    cause: Cause
    name: str
    words: str


def base_of(op: str) -> str:
    """``div`` of ``aten.div.Tensor``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def read(op: BadOp) -> Reading:
    """Cause of a value that is nonfinite in every precision."""
    if op.kind == "arrived":
        return _arrived(op)
    if op.kind == "escalated":
        return Reading(
            "data", "all_masked", "NaN was made of a mask's infinities: a row in which nothing was left unmasked"
        )
    if op.kind == "constant":
        return Reading("data", "constant", "a nonfinite constant was written into what the loss is computed from")
    if op.phase == "backward":
        return Reading(
            "numerics", "derivative", f"the derivative of {op.node or base_of(op.op)} is not finite at this input"
        )
    if op.outputs and op.outputs[0].dtype in ("float16", "bfloat16") and (detail := headroom(op)):
        return Reading("numerics", "overflow", f"{base_of(op.op)} overflowed: {detail}")
    if _overflowed(op):
        return Reading(
            "optimization",
            "growth",
            f"finite inputs of up to {_largest(op.inputs):.3g} overflowed: values have run away",
        )
    return _forward(op)


def headroom(op: BadOp) -> str:
    """How far the operands were from what their dtype can hold."""
    dtype = op.outputs[0].dtype if op.outputs else ""
    limit, largest = MAXIMA.get(dtype), _largest(op.inputs)
    if limit is None or not op.outputs or not (op.outputs[0].posinf or op.outputs[0].neginf):
        return ""
    return f"inputs reach {largest:.5g} and {dtype} holds {limit:.5g} at most"


def _arrived(op: BadOp) -> Reading:
    what = op.what or "a tensor"
    if what.startswith(("parameter", "buffer")):
        return Reading("unknown", "damaged_state", f"{what} was nonfinite before the step began")
    return Reading("data", "batch", f"{what} was nonfinite as it came into the step")


def _forward(op: BadOp) -> Reading:
    base = base_of(op.op)
    if base.startswith(_LOSSES):
        return Reading("data", "empty_mean", f"{base} had nothing to average over, or targets that it cannot take")
    if base.startswith(_SPREADS):
        return Reading("data", "too_few", f"{base} of {_shape(op.inputs)} elements is not defined")
    culprit = op.inputs[1] if base in ("div", "div_", "divide", "true_divide") and len(op.inputs) > 1 else None
    if culprit is not None and culprit.zeros:
        cause: Cause = "numerics" if culprit.trained else "data"
        return Reading(
            cause, "division_by_zero", f"division by zero: {culprit.zeros} of {math.prod(culprit.shape)} divisors"
        )
    first = op.inputs[0] if op.inputs else None
    if first is not None and first.zeros and base in ("log", "log2", "log10", "reciprocal", "rsqrt", "pow"):
        return Reading(
            "numerics" if first.trained else "data",
            f"{base}_of_zero",
            f"{base} of zero: {first.zeros} of {math.prod(first.shape)} elements",
        )
    return Reading(
        "numerics" if any(i.trained for i in op.inputs) else "data", "undefined", f"{base} is not defined there"
    )


def _overflowed(op: BadOp) -> bool:
    """Infinite from operands so large that nothing but growth explains them."""
    out = op.outputs[0] if op.outputs else None
    return out is not None and bool(out.posinf or out.neginf) and _largest(op.inputs) >= HUGE


def _largest(operands: tuple[OperandStatistics, ...]) -> float:
    ends = [abs(end) for one in operands for end in (one.minimum, one.maximum) if end is not None]
    return max(ends, default=0.0)


def _shape(operands: tuple[OperandStatistics, ...]) -> str:
    return " x ".join(map(str, operands[0].shape)) if operands else "no"
