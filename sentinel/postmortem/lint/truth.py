"""Is a condition true for given integers? A small evaluator for the arithmetic of accumulation loops.

Owns integers, comparisons and boolean operators of a syntax tree; nothing is executed. What it cannot know raises ``Unknown``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from sentinel.postmortem.lint.flow import resolve
from sentinel.postmortem.lint.source import Source

_OPERATORS: dict[type[ast.AST], Callable[[int, int], int | bool]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_COUNT = re.compile(r"accum|micro", re.IGNORECASE)


class Unknown(Exception):
    """The value depends on something that is not in the text."""


def truth(source: Source, test: ast.expr, known: dict[str, int], count: int) -> bool:
    """Is ``test`` true for these values of names, unknown accumulation counts being ``count``? Raises Unknown."""
    return bool(_value(source, test, known, count, 8))


def _value(source: Source, node: ast.expr | None, known: dict[str, int], count: int, depth: int) -> int:
    if depth == 0 or node is None:
        raise Unknown
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name | ast.Attribute):
        return _named(source, node, known, count, depth)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _value(source, node.operand, known, count, depth - 1)
    if isinstance(node, ast.BoolOp):
        parts = (bool(_value(source, part, known, count, depth - 1)) for part in node.values)
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.BinOp):
        return _apply(source, node.op, node.left, node.right, known, count, depth)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _apply(source, node.ops[0], node.left, node.comparators[0], known, count, depth)
    raise Unknown


def _named(source: Source, node: ast.Name | ast.Attribute, known: dict[str, int], count: int, depth: int) -> int:
    name = node.id if isinstance(node, ast.Name) else node.attr
    if name in known:
        return known[name]
    made = resolve(source, node)
    if made is not node:
        try:
            return _value(source, made, known, count, depth - 1)
        except Unknown:
            pass
    if _COUNT.search(name):
        return count
    raise Unknown


def _apply(
    source: Source, op: ast.AST, left: ast.expr, right: ast.expr, known: dict[str, int], count: int, depth: int
) -> int:
    apply = _OPERATORS.get(type(op))
    if apply is None:
        raise Unknown
    try:
        return int(apply(*(_value(source, side, known, count, depth - 1) for side in (left, right))))
    except ZeroDivisionError:
        raise Unknown from None
