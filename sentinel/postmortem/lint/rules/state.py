"""Rules for state that outlives a step: parameters nobody filled, buffers a skipped step leaves poisoned, ranks that skip alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sentinel.postmortem.lint.finding import Hit, Rule
from sentinel.postmortem.lint.flow import derivation
from sentinel.postmortem.lint.source import Source, code, dotted

_EMPTY = ("torch.empty", "torch.empty_like", "torch.Tensor", "torch.FloatTensor", "torch.empty_strided")
_ALL_PARAMETERS = ("parameters", "named_parameters", "load_state_dict", "_load_from_state_dict")
_FINITE = ("isfinite", "isnan", "isinf")


def _unfilled(source: Source) -> Iterator[Hit]:
    for node in source.every(ast.Assign, ast.AnnAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if not isinstance(target, ast.Attribute) or dotted(target.value) != "self":
            continue
        if _is_empty_parameter(source, node.value) and not _is_filled(source, node, target.attr):
            yield Hit(node, f"`{code(target)}` is memory as it was found; nothing in this file fills it")


def _is_empty_parameter(source: Source, made: ast.expr | None) -> bool:
    if not isinstance(made, ast.Call) or not source.canonical(made.func).endswith("nn.Parameter") or not made.args:
        return False
    if len(made.args) > 1 or made.keywords:
        return False  # without a gradient it is storage, for quantised weights say
    inner = made.args[0]
    if not isinstance(inner, ast.Call) or source.canonical(inner.func) not in _EMPTY:
        return False
    return bool(inner.args) and not _is_list(inner.args[0])


def _is_list(node: ast.expr) -> bool:
    """``torch.Tensor([1.0])`` holds what it was given."""
    return isinstance(node, ast.List | ast.ListComp)


def _is_filled(source: Source, made: ast.stmt, name: str) -> bool:
    """True if the parameter is written anywhere in the file, or may be by a base class or by a loop over all parameters."""
    own = next((outer for outer in source.parents(made) if isinstance(outer, ast.ClassDef)), None)
    if own is not None and any(not dotted(base).endswith("Module") for base in own.bases):
        return True
    for call in source.calls:
        writes = source.canonical(call.func).rpartition(".")[2].endswith("_") or "init" in dotted(call.func)
        if writes and any(_has_attribute(part, name) for part in (call.func, *call.args)):
            return True
        if dotted(call.func).rpartition(".")[2] in _ALL_PARAMETERS and own is not None and own in source.parents(call):
            return True
    if any(a.attr == name and dotted(a.value) != "self" for a in source.every(ast.Attribute)):
        return True  # from outside, as in an _init_weights(module)
    for node in source.every(ast.Assign, ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node is not made and any(_has_attribute(t, name) for t in targets):
            return True
    return False


def _has_attribute(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == name for part in ast.walk(node))


def _poisoned_buffers(source: Source) -> Iterator[Hit]:
    if not any("BatchNorm" in source.canonical(call.func) for call in source.calls):
        return
    for call in source.calls:
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "step" and "opt" in code(call).lower()):
            continue
        branch = next((o for o in source.parents(call) if isinstance(o, ast.If)), None)
        if branch is not None and _asks_finite(source, branch.test) and not _holds_forward(branch):
            yield Hit(
                call, "the step is left out after a nonfinite loss, the running statistics keep what the forward wrote"
            )


def _holds_forward(branch: ast.If) -> bool:
    """True if the loss is made under the condition: then it was the batch that was looked at, before the forward."""
    names = (n for n in ast.walk(branch) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return any("loss" in name.id.lower() for name in names)


def _asks_finite(source: Source, test: ast.expr) -> bool:
    return any(
        isinstance(part, ast.Call) and dotted(part.func).rpartition(".")[2] in _FINITE
        for part in derivation(source, test)
    )


def _lonely_skip(source: Source) -> Iterator[Hit]:
    names = {source.canonical(call.func).rpartition(".")[2] for call in source.calls}
    if not names & {"DistributedDataParallel", "DDP", "FullyShardedDataParallel", "fully_shard"}:
        return
    agreed = names & {"all_reduce", "all_gather", "all_gather_object", "broadcast"}
    for node in source.every(ast.Continue):
        branch = source.parent(node)
        if agreed or not isinstance(branch, ast.If) or not _asks_finite(source, branch.test):
            continue
        loop = next((o for o in source.parents(node) if isinstance(o, ast.For | ast.While)), None)
        if loop is not None and _backward_below(loop, node.lineno):
            yield Hit(node, f"a rank whose `{code(branch.test)}` skips its backward; the others wait for its gradients")


def _backward_below(loop: ast.For | ast.While, line: int) -> bool:
    return any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "backward" and n.lineno > line
        for n in ast.walk(loop)
    )


RULES = (
    Rule(
        "torch_empty_param",
        "torch.empty returns memory as it was: usually zeros in a fresh process, sometimes NaN or 1e38 in one that has run. DDP "
        "then broadcasts rank 0's to all.",
        "fill it: nn.Parameter(torch.ones(d)), or nn.init.…_(self.weight) in __init__",
        _unfilled,
        frozenset({"parameter", "empty"}),
    ),
    Rule(
        "batchnorm_buffers_after_skip",
        "BatchNorm updates running_mean and running_var in the forward, before the loss is looked at: one inf in one batch makes "
        "them NaN for ever. Training goes on (it uses batch statistics), validation is NaN.",
        "look at the batch before the forward, or keep a copy of the buffers and put it back when a step is left out",
        _poisoned_buffers,
        frozenset({"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"}),
    ),
    Rule(
        "skip_without_agreement",
        "DDP's backward waits for all ranks. One that jumps to its next batch pairs its next gradients with the others' present "
        "ones, or everyone waits for the timeout.",
        "agree first: all_reduce a flag with MAX and skip on all ranks, or zero the loss and run the backward anyway",
        _lonely_skip,
    ),
)
