"""Where values come from: names followed to what they were last bound to, reshapes and casts looked through.

Owns the little data flow that rules need, inside one function (or a script's top level). What protects a value is ``guards.py``'s.
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

from sentinel.postmortem.lint.arguments import may_be_zero
from sentinel.postmortem.lint.expressions import SHAPES, operation
from sentinel.postmortem.lint.source import Scope, Source

DEPTH = 6

Place = tuple[int, int]  # line and column


def binding(source: Source, name: ast.Name) -> ast.expr | None:
    """The expression last bound to ``name`` before its use, in its function or at the top level; None if that is not known."""
    for scope in (source.scope(name), source.tree):
        found = source.once("bindings", scope, partial(_bindings, source, scope)).get(name.id, [])
        before = bisect_left(found, (name.lineno, name.col_offset), key=lambda one: one[0])
        if before:
            return found[before - 1][1]
        if _is_parameter(scope, name.id):
            return None
    return None


def resolve(source: Source, node: ast.expr | None) -> ast.expr | None:
    """``node``, or what it was bound to if it is a name whose binding is known."""
    for _ in range(DEPTH):
        if not isinstance(node, ast.Name):
            break
        bound = binding(source, node)
        if bound is None:
            break
        node = bound
    return node


def core(source: Source, node: ast.expr | None) -> ast.expr | None:
    """``node`` without reshapes, casts and indexing around it, names followed: where its values were computed."""
    for _ in range(2 * DEPTH):
        node = resolve(source, node)
        op = operation(source, node)
        if op is not None and op.name in SHAPES and op.subject is not None:
            node = op.subject
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and may_be_zero(source, node.right):
            node = node.left
        else:
            break
    return node


def derivation(source: Source, node: ast.AST, depth: int = DEPTH) -> Iterator[ast.AST]:
    """Every node of an expression, and of what its names were bound to."""
    for inner in ast.walk(node):
        yield inner
        if depth and isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            bound = binding(source, inner)
            if bound is not None:
                yield from derivation(source, bound, depth - 1)


def _bindings(source: Source, scope: Scope) -> dict[str, list[tuple[Place, ast.expr]]]:
    """Of every name bound in ``scope`` what it was bound to, with the place where that expression ends, in order."""
    found: dict[str, list[tuple[Place, ast.expr]]] = defaultdict(list)
    for node in source.inside(scope, ast.Assign, ast.AnnAssign, ast.NamedExpr):
        if node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target, value in (pair for one in targets for pair in _pairs(one, node.value)):
            if isinstance(target, ast.Name):
                found[target.id].append(((value.end_lineno or value.lineno, value.end_col_offset or 0), value))
    return {name: sorted(bound, key=lambda one: one[0]) for name, bound in found.items()}


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple | ast.List):
        if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
            for inner, one in zip(target.elts, value.elts, strict=True):
                yield from _pairs(inner, one)
    else:
        yield target, value


def _is_parameter(scope: Scope, name: str) -> bool:
    if isinstance(scope, ast.Module):
        return False
    arguments = scope.args
    return name in {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
