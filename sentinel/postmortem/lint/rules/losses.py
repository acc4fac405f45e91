"""Rules for losses: probabilities where logits belong, and means over what may be nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from sentinel.postmortem.lint.expressions import argument, is_mask, number, operation
from sentinel.postmortem.lint.finding import Hit, Rule
from sentinel.postmortem.lint.flow import core, derivation, resolve
from sentinel.postmortem.lint.guards import is_tested, without_gradient
from sentinel.postmortem.lint.source import Source, code

_MEANS = ("cross_entropy", "nll_loss")


def _sigmoid_bce(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        name = source.canonical(call.func)
        if name.startswith("torch.") and name.endswith(".BCELoss"):
            if uses_autocast(source) or _has_sigmoid(source):
                yield Hit(call, "BCELoss takes probabilities: the sigmoid before it rounds to exactly 0 or 1")
        elif name == "torch.nn.functional.binary_cross_entropy" and call.args:
            given = operation(source, core(source, call.args[0]))
            if (given is not None and given.name == "sigmoid") or uses_autocast(source):
                yield Hit(call, f"binary_cross_entropy of `{code(call.args[0])}`: the sigmoid rounds to exactly 0 or 1")


def uses_autocast(source: Source) -> bool:
    """True if the file enters an autocast region."""
    return any(source.canonical(call.func).rpartition(".")[2] == "autocast" for call in source.calls)


def _has_sigmoid(source: Source) -> bool:
    return any(source.canonical(call.func).rpartition(".")[2] in ("sigmoid", "Sigmoid") for call in source.calls)


def _empty_mean(source: Source) -> Iterator[Hit]:
    yield from _ignored_targets(source)
    yield from _empty_selections(source)


def _ignored_targets(source: Source) -> Iterator[Hit]:
    """A mean over targets of which the same file sets a stretch of any length to the ignored index."""
    for call in source.calls:
        op = operation(source, call)
        if op is None or op.name not in _MEANS or without_gradient(source, call):
            continue
        ignored = op.keywords.get("ignore_index")
        target = argument(op, 0, "target")
        reduction = op.keywords.get("reduction")
        is_mean = reduction is None or (isinstance(reduction, ast.Constant) and reduction.value == "mean")
        if ignored is None or not is_mean or target is None or is_tested(source, target):
            continue
        if _sets(source, number(resolve(source, ignored))):
            yield Hit(call, f"the mean over the targets of `{code(target)}` is 0/0 if all of them are ignored")


def _sets(source: Source, ignored: float | None) -> bool:
    """True if somewhere in the file labels are set to the ignored index by slice or by mask."""
    return any(
        isinstance(node.targets[0], ast.Subscript) and ignored is not None and number(node.value) == ignored
        for node in source.every(ast.Assign)
    )


def _empty_selections(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        op = operation(source, call)
        if op is None or op.name != "mean" or op.subject is None or op.arguments or op.keywords:
            continue
        chosen = resolve(source, op.subject)
        if (
            not isinstance(chosen, ast.Subscript)
            or not _selects(source, chosen.slice)
            or without_gradient(source, call)
        ):
            continue
        looked_at = any(is_tested(source, part) for part in (chosen.slice, chosen, op.subject))
        if _is_loss(source, call) and not looked_at:
            yield Hit(call, f"the mean of `{code(chosen)}` is 0/0 if nothing is selected")


def _selects(source: Source, index: ast.expr) -> bool:
    inner = resolve(source, index) or index
    if isinstance(inner, ast.Slice | ast.Tuple):
        return False
    return is_mask(index) or is_mask(inner)


def _is_loss(source: Source, call: ast.Call) -> bool:
    """True if the mean is (part of) something called a loss."""
    statement = source.statement(call)
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AugAssign):
        targets = [statement.target]
    scope = source.scope(call)
    names = [name for target in targets for part in derivation(source, target, 0) for name in _name(part)]
    if isinstance(statement, ast.Return) and not isinstance(scope, ast.Module):
        names.append(scope.name)
    return any(re.search(r"loss", name, re.IGNORECASE) for name in names)


def _name(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr


RULES = (
    Rule(
        "sigmoid_bce",
        "A sigmoid rounds to exactly 1 above 17 in float32 and above 8 in float16: BCELoss then takes log(0), clamps it to "
        "-100, and its gradient 1/(p(1-p)) reaches 1e12, which overflows float16 on the way back.",
        "use BCEWithLogitsLoss (binary_cross_entropy_with_logits) on the logits; it is safe under autocast",
        _sigmoid_bce,
        frozenset({"binary_cross_entropy", "binary_cross_entropy_backward", "sigmoid", "_to_copy", "log"}),
    ),
    Rule(
        "mean_over_possibly_empty",
        "The mean over no element is 0/0 = NaN. One batch in which every label is ignored (a prompt longer than the window) or "
        "nothing is selected is enough.",
        "sum and divide by the count clamped to 1: loss.sum() / count.clamp(min=1)",
        _empty_mean,
        frozenset({"nll_loss_forward", "nll_loss2d_forward", "mean", "div", "cross_entropy_loss"}),
    ),
)
