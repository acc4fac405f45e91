"""Rules for attention and softmax: masks with -inf, with a dtype's minimum or with a number too large for it, softmax by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from sentinel.postmortem.lint.expressions import argument, identifiers, is_negative_infinity, number, operation
from sentinel.postmortem.lint.finding import Hit, Rule
from sentinel.postmortem.lint.flow import core, derivation, resolve
from sentinel.postmortem.lint.guards import is_bounded, without_gradient
from sentinel.postmortem.lint.rules.division import divisions
from sentinel.postmortem.lint.source import Source, code, same

HALF_MAXIMUM = 65504
_FILLS = ("full", "full_like", "masked_fill", "masked_fill_", "where", "triu", "triu_", "tril", "tril_", "mul")
# A mask made of these lets every row see something (itself), or is a cut that always keeps the best.
_STRUCTURAL = re.compile(
    r"tril|triu|causal|eye|diag|topk|sort|cumsum|top_?[kp]|remove|window|nucleus|min_p|threshold|a?max$", re.IGNORECASE
)


def _empty_rows(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        op = operation(source, call)
        if op is None or op.name not in ("softmax", "log_softmax") or op.subject is None:
            continue
        filled = _filled(source, op.subject)
        if filled is None or without_gradient(source, call) or _is_repaired(source, call):
            continue
        mask = operation(source, filled)
        selects = argument(mask, 0, "mask") if mask is not None else None
        if selects is None or _is_structural(source, selects):
            continue
        yield Hit(filled, f"`{code(selects)}` may cover a whole row: softmax of a row of -inf is NaN")


def _filled(source: Source, subject: ast.expr) -> ast.expr | None:
    """The ``masked_fill(mask, -inf)`` that a softmax is taken of, if it is one."""
    found = resolve(source, subject)
    op = operation(source, found)
    if op is not None and op.name in ("masked_fill", "masked_fill_"):
        value = argument(op, 1, "value")
        return found if value is not None and is_negative_infinity(source, resolve(source, value)) else None
    return None


def _is_structural(source: Source, mask: ast.expr) -> bool:
    return any(
        _STRUCTURAL.search(name)
        for part in derivation(source, mask)
        if isinstance(part, ast.Name | ast.Attribute)
        for name in identifiers(part)
    )


def _is_repaired(source: Source, softmax: ast.Call) -> bool:
    """True if the result's NaN rows are replaced, or rows are tested, in the same function."""
    scope = source.scope(softmax)
    for call in source.inside(scope, ast.Call):
        op = operation(source, call)
        if op is not None and op.name in ("nan_to_num", "nan_to_num_", "isnan"):
            return True
        if op is not None and op.name in ("masked_fill", "masked_fill_") and number(argument(op, 1, "value")) == 0:
            return True
    return False


def _two_minima(source: Source) -> Iterator[Hit]:
    reported: set[ast.AST] = set()
    for node in reversed(source.every(ast.BinOp)):
        if not isinstance(node.op, ast.Add) or any(part in reported for part in ast.walk(node)):
            continue
        sides = [_holds_minimum(source, side) for side in (node.left, node.right)]
        if all(sides) or (any(sides) and source.names_half and _is_tensor(node)):
            reported.add(node)
            both = (
                "two masks of the dtype's minimum add up to"
                if all(sides)
                else "the dtype's minimum plus a score can be"
            )
            yield Hit(node, f"`{code(node)}`: {both} -inf, and a row of -inf is NaN after softmax")


def _holds_minimum(source: Source, node: ast.expr, depth: int = 6) -> bool:
    """True if the value is a mask made of the dtype's minimum: filled, selected or multiplied with it."""
    if depth == 0:
        return False
    inner = core(source, node)
    if isinstance(inner, ast.BinOp):
        return any(_holds_minimum(source, side, depth - 1) for side in (inner.left, inner.right))
    op = operation(source, inner)
    if op is not None and op.name in _FILLS:
        parts = (op.subject, *op.arguments, op.keywords.get("value"), op.keywords.get("fill_value"))
        return any(_holds_minimum(source, part, depth - 1) for part in parts if part is not None)
    return inner is not None and _is_finfo_min(source, inner)


def _is_finfo_min(source: Source, node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "min"
        and isinstance(node.value, ast.Call)
        and source.canonical(node.value.func).endswith("torch.finfo")
    )


def _is_tensor(node: ast.BinOp) -> bool:
    """Not ``finfo.min + 1`` and the like."""
    return number(node.left) is None and number(node.right) is None


def _too_large(source: Source) -> Iterator[Hit]:
    if not source.names_half:
        return
    for call in source.calls:
        op = operation(source, call)
        if op is not None and op.name in ("masked_fill", "masked_fill_"):
            value = number(resolve(source, argument(op, 1, "value")))
            if value is not None and value < -HALF_MAXIMUM:
                yield Hit(call, f"{value:g} does not fit float16, whose lowest value is -65504")
    for node in source.every(ast.BinOp):
        if isinstance(node.op, ast.Mult):
            for side, other in ((node.left, node.right), (node.right, node.left)):
                value = number(side)
                if value is not None and value < -HALF_MAXIMUM and "mask" in " ".join(identifiers(other)).lower():
                    yield Hit(node, f"a mask times {value:g} is -inf in float16, whose lowest value is -65504")


def _by_hand(source: Source) -> Iterator[Hit]:
    for node, divided, by in divisions(source):
        top, total = operation(source, resolve(source, divided)), operation(source, resolve(source, by))
        if top is None or total is None or top.name != "exp" or total.name != "sum" or top.subject is None:
            continue
        bottom = operation(source, resolve(source, total.subject))
        if bottom is None or bottom.name != "exp" or bottom.subject is None or not same(top.subject, bottom.subject):
            continue
        if not is_bounded(source, top.subject):
            yield Hit(node, f"softmax by hand: exp(`{code(top.subject)}`) overflows, and inf/inf is NaN")


RULES = (
    Rule(
        "masked_fill_neg_inf_then_softmax",
        "softmax of a row in which everything is -inf is NaN in every dtype (exp(-inf - -inf)). An empty document or a fully "
        "padded sequence is such a row.",
        "make sure each row keeps one entry, or fill with torch.finfo(scores.dtype).min and drop the empty rows' output",
        _empty_rows,
        frozenset({"_softmax", "softmax", "_log_softmax", "masked_fill", "_safe_softmax"}),
    ),
    Rule(
        "finfo_min_mask_addition",
        "torch.finfo(dtype).min plus anything more negative than half its last digit is -inf (in float16: -65504 - 20), and "
        "twice the minimum is -inf in every dtype. A row of -inf is NaN after softmax.",
        "combine boolean masks first and fill once: scores.masked_fill(~(causal & keep), torch.finfo(dtype).min)",
        _two_minima,
        frozenset({"add", "add_", "_softmax", "softmax"}),
    ),
    Rule(
        "mask_fill_too_large",
        "float16 ends at 65504: -1e9 becomes -inf (or an error), and a row of -inf is NaN after softmax.",
        "fill with torch.finfo(scores.dtype).min",
        _too_large,
        frozenset({"masked_fill", "mul", "add", "_softmax", "softmax"}),
    ),
    Rule(
        "softmax_by_hand",
        "exp overflows to inf above 88.7 in float32 and 11.1 in float16, and inf/inf is NaN.",
        "torch.softmax(x, dim), which subtracts the maximum first",
        _by_hand,
        frozenset({"exp", "div", "sum"}),
    ),
)
