"""Rule for clipping by a norm that itself overflows: finite gradients whose squares do not fit."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sentinel.postmortem.lint.expressions import number
from sentinel.postmortem.lint.finding import Hit, Rule
from sentinel.postmortem.lint.flow import binding
from sentinel.postmortem.lint.source import Source, dotted

LARGEST = 1.8e19  # its square is float32's maximum
DEPTH = 8


def _overflowing_norm(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        if not source.canonical(call.func).endswith("clip_grad_norm_") or _raises(call):
            continue
        factor = max((_factor(source, loss, DEPTH) for loss in _losses(source, call)), default=1.0)
        if factor > LARGEST:
            yield Hit(
                call, f"constants in the loss multiply to {factor:.0e}: the square of such a gradient is inf in float32"
            )


def _raises(call: ast.Call) -> bool:
    flag = next((k.value for k in call.keywords if k.arg == "error_if_nonfinite"), None)
    return isinstance(flag, ast.Constant) and flag.value is True


def _losses(source: Source, clip: ast.Call) -> Iterator[ast.expr]:
    """What backward is called on above the clipping, in the same function."""
    for call in source.inside(source.scope(clip), ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and call.lineno < clip.lineno:
            yield call.func.value


def _factor(source: Source, node: ast.expr, depth: int) -> float:
    """The product of the large constants that a value was multiplied by, along the path where it is largest."""
    if depth == 0:
        return 1.0
    if isinstance(node, ast.Name):
        bound = binding(source, node)
        return _factor(source, bound, depth - 1) if bound is not None else 1.0
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _side(source, node.left, depth) * _side(source, node.right, depth)
    if isinstance(node, ast.Call):
        inner = [
            *node.args,
            *([node.func.value] if isinstance(node.func, ast.Attribute) and dotted(node.func) == "" else []),
        ]
        return max((_factor(source, part, depth - 1) for part in inner), default=1.0)
    if isinstance(node, ast.BinOp):
        return max(_factor(source, node.left, depth - 1), _factor(source, node.right, depth - 1))
    return 1.0


def _side(source: Source, node: ast.expr, depth: int) -> float:
    value = number(node)
    return abs(value) if value is not None and abs(value) > 1 else _factor(source, node, depth - 1)


RULES = (
    Rule(
        "clip_norm_nonfinite",
        "The norm sums squares: gradients of 2e19 square to more than float32's 3.4e38, the norm is inf and the clip factor "
        "1/inf = 0. Every gradient becomes 0, the weights never move, and nothing is NaN.",
        "bring loss and targets to order 1, or pass error_if_nonfinite=True so that it says so",
        _overflowing_norm,
        frozenset({"_foreach_norm", "linalg_vector_norm"}),
    ),
)
