"""What protects a value: an epsilon, a clamp, a condition that looks at it, or that no gradient passes.

Owns the judgement. Where it cannot tell it says "guarded": a linter that cries wolf is switched off.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sentinel.postmortem.lint.arguments import may_be_zero
from sentinel.postmortem.lint.expressions import CLAMPS, SHAPES, is_epsilon, number, operation
from sentinel.postmortem.lint.flow import DEPTH, binding, resolve
from sentinel.postmortem.lint.source import Scope, Source, dotted

_REPAIRS = frozenset({"clamp_", "clamp_min_", "clip_", "add_", "masked_fill_", "fill_", "nan_to_num_", "index_fill_"})
_SPREADING = frozenset({"sum", "mean", "sqrt", "norm", "prod"})
_COUNTS = frozenset({"numel", "nelement", "size", "any", "sum", "count_nonzero", "item"})
_OF_THE_KIND = ("isinstance", "hasattr", "callable", "is_tensor", "is_floating_point", "is_complex", "is_contiguous")


def is_guarded(source: Source, node: ast.expr | None, depth: int = DEPTH) -> bool:
    """True if the value cannot be zero as written (an epsilon added, a clamp), or was tested or repaired nearby."""
    if node is None or depth == 0:
        return True
    if is_tested(source, node):
        return True
    if isinstance(node, ast.Name):
        bound = binding(source, node)
        return _is_repaired(source, node) or (bound is not None and is_guarded(source, bound, depth - 1))
    if isinstance(node, ast.BinOp):
        return _is_guarded_arithmetic(source, node, depth)
    if isinstance(node, ast.IfExp | ast.BoolOp):
        return True
    if isinstance(node, ast.Subscript):
        return is_guarded(source, node.value, depth - 1)
    return _is_guarded_call(source, node, depth)


def is_tested(source: Source, node: ast.expr) -> bool:
    """True if a condition in the same function looks at this value (``if mask.any():`` for ``mask.sum()``)."""
    scope = source.scope(node)
    tested = source.once("tested", scope, lambda: _tested(source, scope))
    return any(ast.dump(one) in tested for one in (node, *_subjects(source, node)) if not isinstance(one, ast.Constant))


def is_bounded(source: Source, node: ast.expr | None) -> bool:
    """True for an exponent that is (most likely) at most 0: a maximum was subtracted, it is negative, or it was clamped."""
    inner = resolve(source, node)
    if isinstance(inner, ast.BinOp):
        scales = isinstance(inner.op, ast.Mult | ast.Div)
        return isinstance(inner.op, ast.Sub) or (scales and any(_is_low(source, s) for s in (inner.left, inner.right)))
    if inner is None or (isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.USub)):
        return True
    found = operation(source, inner)
    return found is not None and found.name in ("clamp", "clip", "minimum", "log_softmax")


def _is_low(source: Source, node: ast.expr) -> bool:
    """A factor that makes a product negative or small: a negative number, or something bounded itself."""
    return (number(node) or 0) < 0 or (isinstance(node, ast.BinOp | ast.UnaryOp) and is_bounded(source, node))


def without_gradient(source: Source, node: ast.AST) -> bool:
    """True inside ``torch.no_grad()`` and the like, and in files of optimizers: nothing flows back through the code there."""
    if source.once("optimizers", source.tree, lambda: _defines_optimizer(source)):
        return True
    for outer in source.parents(node):
        marks: list[ast.expr] = []
        if isinstance(outer, ast.With | ast.AsyncWith):
            marks = [item.context_expr for item in outer.items]
        elif isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            marks = outer.decorator_list
        names = (dotted(mark.func if isinstance(mark, ast.Call) else mark) for mark in marks)
        if any(name.rpartition(".")[2] in ("no_grad", "inference_mode") for name in names):
            return True
    return False


def _is_repaired(source: Source, name: ast.Name) -> bool:
    scope = source.scope(name)
    return name.id in source.once("repaired", scope, lambda: set(_repaired(source, scope)))


def _repaired(source: Source, scope: Scope) -> Iterator[str]:
    """Names of ``std[std == 0] = 1``, ``std.clamp_(min=…)``, ``std += eps``."""
    for node in source.inside(scope, ast.Assign, ast.AugAssign, ast.Call):
        target: ast.expr | None = None
        if isinstance(node, ast.AugAssign):
            target = node.target
        elif isinstance(node, ast.Assign):
            target = node.targets[0].value if isinstance(node.targets[0], ast.Subscript) else None
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _REPAIRS:
            target = node.func.value
        if isinstance(target, ast.Name):
            yield target.id


def _is_guarded_arithmetic(source: Source, node: ast.BinOp, depth: int) -> bool:
    if isinstance(node.op, ast.Add) and any(_protects(source, side) for side in (node.left, node.right)):
        return True
    if isinstance(node.op, ast.Add | ast.Mult | ast.Div | ast.Pow):
        return any(
            is_guarded(source, side, depth - 1)
            for side in (node.left, node.right)
            if not isinstance(side, ast.Constant)
        )
    return False


def _protects(source: Source, added: ast.expr) -> bool:
    """An epsilon that is not known to be zero."""
    value = resolve(source, added)
    return is_epsilon(added) and not (value is not None and may_be_zero(source, value))


def _is_guarded_call(source: Source, node: ast.expr, depth: int) -> bool:
    if isinstance(node, ast.Call) and dotted(node.func) == "max" and len(node.args) > 1:
        return True
    op = operation(source, node)
    if op is None:
        return False
    if op.name in CLAMPS or (op.name == "max" and op.arguments) or (op.name == "add" and op.arguments):
        return True
    if op.name in SHAPES or op.name in _SPREADING:
        return op.subject is not None and is_guarded(source, op.subject, depth - 1)
    return False


def _defines_optimizer(source: Source) -> bool:
    return any(dotted(base).endswith("Optimizer") for one in source.every(ast.ClassDef) for base in one.bases)


def _subjects(source: Source, node: ast.expr) -> Iterator[ast.expr]:
    """``mask`` of ``mask.float().sum()``: what a test would look at instead of the value itself."""
    op = operation(source, node)
    while op is not None and op.subject is not None:
        yield op.subject
        op = operation(source, op.subject)


def _tested(source: Source, scope: Scope) -> set[str]:
    """Every value that a condition in ``scope`` looks at, names also as what they stand for."""
    tests = (
        part
        for node in source.inside(scope, ast.If, ast.IfExp, ast.While, ast.Assert)
        for part in _comparing(node.test)
    )
    parts = [part for test in tests for part in ast.walk(test) if isinstance(part, ast.expr)]
    return {ast.dump(one) for part in parts for one in (part, *_stands_for(source, part))}


def _stands_for(source: Source, part: ast.expr) -> Iterator[ast.expr]:
    """What a tested name was bound to; if that is how many there are of something, also what was counted."""
    bound = resolve(source, part)
    while bound is not None and bound is not part:
        yield bound
        part, bound = bound, _counted(source, bound)


def _counted(source: Source, node: ast.expr) -> ast.expr | None:
    """``x`` of ``len(x)``, ``x.numel()``, ``x.shape[0]``, ``x.any()``, ``x.sum().item()``."""
    if isinstance(node, ast.Call) and dotted(node.func) in ("len", "int", "float", "bool") and len(node.args) == 1:
        return node.args[0]
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return node.value.value
    op = operation(source, node)
    return op.subject if op is not None and op.name in _COUNTS else None


def _comparing(test: ast.expr) -> Iterator[ast.expr]:
    """The parts of a condition that look at a value, not only at whether it is there (``is not None``, ``if mask:``)."""
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _comparing(part)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _comparing(test.operand)
    elif (isinstance(test, ast.Compare) and not any(isinstance(op, ast.Is | ast.IsNot) for op in test.ops)) or (
        isinstance(test, ast.Call) and dotted(test.func).rpartition(".")[2] not in _OF_THE_KIND
    ):
        yield test
