"""Rules for divisions: by a spread, a norm or a count that can be zero, and a spread over too few elements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from sentinel.postmortem.lint.expressions import Operation, argument, is_mask, number, operation
from sentinel.postmortem.lint.finding import Hit, Rule
from sentinel.postmortem.lint.flow import binding, core, resolve
from sentinel.postmortem.lint.guards import is_guarded, is_tested
from sentinel.postmortem.lint.source import Source, code, same

_GROUP = re.compile(r"^(r|rew|rewards?|adv|advantages?|returns?|group\w*|\w*_(rewards?|advantages?|returns?))$")
_NORMS = ("norm", "vector_norm", "matrix_norm")
_FACTORIES = ("rand", "randn", "zeros", "ones", "empty", "full", "tensor", "stack", "cat")
_LEARNED = re.compile(r"weight|param|kernel|filter|proto|codebook|center|direction|noise", re.IGNORECASE)


def divisions(source: Source) -> Iterator[tuple[ast.expr | ast.AugAssign, ast.expr, ast.expr]]:
    """Every division: its node, what is divided, and by what."""
    for node in source.every(ast.BinOp, ast.AugAssign, ast.Call):
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Div):
                yield node, node.left, node.right
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.op, ast.Div):
                yield node, node.target, node.value
        else:
            op = operation(source, node)
            by = argument(op, 0, "other") if op and op.name in ("div", "div_", "true_divide") else None
            if op is not None and op.subject is not None and by is not None:
                yield node, op.subject, by


def _by_std(source: Source) -> Iterator[Hit]:
    for node, _, by in divisions(source):
        op = _spread(source, by)
        if op is not None and not is_guarded(source, by) and not _is_random(source, op.subject):
            yield Hit(node, f"divides by `{code(op.call)}`, which is 0 where all values are equal")


def _spread(source: Source, node: ast.expr) -> Operation | None:
    """The std (or square root of a var) that ``node`` is, if it is one."""
    op = operation(source, core(source, node))
    if op is not None and op.name == "sqrt":
        op = operation(source, core(source, op.subject))
        return op if op is not None and op.name == "var" else None
    return op if op is not None and op.name in ("std", "std_mean") else None


def _by_range(source: Source) -> Iterator[Hit]:
    for node, _, by in divisions(source):
        span = core(source, by)
        if not isinstance(span, ast.BinOp) or not isinstance(span.op, ast.Sub) or is_guarded(source, by):
            continue
        high, low = (operation(source, core(source, side)) for side in (span.left, span.right))
        if high is None or low is None or high.subject is None or low.subject is None:
            continue
        if is_tested(source, span.left) or is_tested(source, span.right):
            continue
        if high.name in ("max", "amax") and low.name in ("min", "amin") and same(high.subject, low.subject):
            yield Hit(node, f"divides by `{code(span)}`, which is 0 where all values are equal")


def _by_norm(source: Source) -> Iterator[Hit]:
    for node, divided, by in divisions(source):
        op = operation(source, core(source, by))
        if op is None or op.name not in _NORMS or op.subject is None or is_guarded(source, by):
            continue
        own = core(source, op.subject)
        is_itself = own is not None and any(same(part, op.subject) or same(part, own) for part in ast.walk(divided))
        never_zero = _is_random(source, op.subject) or _is_product(own) or _LEARNED.search(code(op.subject))
        if is_itself and not never_zero and not is_compression(source, node):
            yield Hit(node, f"divides by `{code(op.call)}`, which is 0 for an all-zero vector")


def _is_product(node: ast.expr | None) -> bool:
    """A matrix product of something nonzero with itself, as power iterations have it, is not zero."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)


def is_compression(source: Source, node: ast.AST) -> bool:
    """True inside a function that works on gradients, as low-rank compression does (it has a rule of its own)."""
    scope = source.scope(node)
    return not isinstance(scope, ast.Module) and source.once("compresses", scope, lambda: _compresses(source, scope))


def _compresses(source: Source, scope: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    grads = any(attribute.attr == "grad" for attribute in source.inside(scope, ast.Attribute))
    return grads or bool(re.search(r"compress|orthogonal|power_?sgd", scope.name))


def _by_mask_sum(source: Source) -> Iterator[Hit]:
    for node, _, by in divisions(source):
        op = operation(source, core(source, by))
        if op is None or op.name not in ("sum", "count_nonzero") or op.subject is None or is_guarded(source, by):
            continue
        if is_mask(core(source, op.subject) or op.subject) or is_mask(op.subject):
            yield Hit(node, f"divides by `{code(op.call)}`, which is 0 where nothing is selected")


def _small_n(source: Source) -> Iterator[Hit]:
    for node, _, by in divisions(source):
        for op in (operation(source, part) for part in ast.walk(by)):
            if op is None or op.name not in ("std", "var") or op.subject is None or not _is_unbiased_whole(op):
                continue
            if is_guarded(source, by) and _is_group(source, op.subject) and not is_tested(source, op.subject):
                yield Hit(node, f"`{code(op.call)}` of a single element is NaN, and adding an epsilon leaves it NaN")


def _is_unbiased_whole(op: Operation) -> bool:
    """std over everything with the default correction of 1."""
    correction = argument(op, 1, "correction", "unbiased")
    first = op.arguments[0] if op.arguments else None
    if isinstance(first, ast.Constant) and isinstance(first.value, bool):
        correction = first
    elif first is not None or "dim" in op.keywords:
        return False
    zero = isinstance(correction, ast.Constant) and correction.value in (False, 0)
    return not zero


def _is_group(source: Source, subject: ast.expr) -> bool:
    """A few rewards of one prompt, a slice made in a loop: what can hold one element."""
    if not isinstance(subject, ast.Name):
        return isinstance(subject, ast.Subscript) and is_mask(subject.slice)
    targets = _loop_targets(source, subject)
    if subject.id in targets:
        return True
    bound = binding(source, subject)
    op = operation(source, bound)
    size = op.subject if op is not None and op.name in _FACTORIES else None
    if isinstance(size, ast.Name) and size.id in targets:
        return True
    picked = isinstance(bound, ast.Subscript) and any(
        isinstance(part, ast.Name) and part.id in targets for part in ast.walk(bound.slice)
    )
    return picked or (bool(targets) and bool(_GROUP.match(subject.id)))


def _loop_targets(source: Source, node: ast.AST) -> set[str]:
    loops = [outer for outer in source.parents(node) if isinstance(outer, ast.For | ast.comprehension)]
    return {name.id for loop in loops for name in ast.walk(loop.target) if isinstance(name, ast.Name)}


def _is_random(source: Source, subject: ast.expr | None) -> bool:
    """Freshly drawn numbers are never all equal."""
    op = operation(source, resolve(source, subject))
    return (
        op is not None and op.name in ("randn", "rand", "randn_like", "rand_like", "normal") and number(subject) is None
    )


RULES = (
    Rule(
        "division_by_std",
        "A constant row (blank image, dead sensor) has standard deviation 0, and 0/0 is NaN. Every weight that sees the sample "
        "gets a NaN gradient in the same step, on all ranks after the reduction.",
        "add an epsilon: x / (x.std() + 1e-6), or clamp the divisor: x.std().clamp_min(1e-6)",
        _by_std,
        frozenset({"div", "div_", "std", "var", "std_mean", "reciprocal"}),
    ),
    Rule(
        "division_by_range",
        "Scaling to 0..1 divides by max - min, which is 0 for a constant sample: 0/0 is NaN.",
        "clamp the divisor: (x - low) / (high - low).clamp_min(1e-6)",
        _by_range,
        frozenset({"div", "div_"}),
    ),
    Rule(
        "division_by_norm",
        "The norm of an all-zero vector (padding, a dead unit) is 0: the quotient is 0/0 = NaN, and just above 0 its gradient "
        "grows as 1/norm.",
        "torch.nn.functional.normalize(x, eps=1e-6) clamps the norm for you",
        _by_norm,
        frozenset({"div", "div_", "linalg_vector_norm", "norm"}),
    ),
    Rule(
        "division_by_mask_sum",
        "A batch in which nothing is selected (all padding, all labels ignored) makes the sum 0/0 = NaN on that rank, while "
        "the others are finite.",
        "divide by mask.sum().clamp(min=1), or leave such batches out on all ranks alike",
        _by_mask_sum,
        frozenset({"div", "div_"}),
    ),
    Rule(
        "unbiased_std_small_n",
        "std() divides by n - 1, so for one element it is 0/0 = NaN; NaN + 1e-4 is still NaN. Groups shrink to one element "
        "when a filter drops the others.",
        "use std(correction=0), or give groups of one element a value of their own",
        _small_n,
        frozenset({"std", "var", "div", "std_mean"}),
    ),
)
