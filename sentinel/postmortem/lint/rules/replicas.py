"""Rules for replicas that silently drift apart: synchronisation switched off or bypassed, different weights at the start."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sentinel.postmortem.lint.finding import Hit, Rule
from sentinel.postmortem.lint.flow import resolve
from sentinel.postmortem.lint.guards import without_gradient
from sentinel.postmortem.lint.rules.collectives import gradient_sums
from sentinel.postmortem.lint.source import Source, code, dotted
from sentinel.postmortem.lint.truth import Unknown, truth

ACCUMULATION = 4  # stands for an accumulation count that is not written as a number


def _no_sync(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "no_sync"):
            continue
        loop = next((outer for outer in source.parents(call) if isinstance(outer, ast.For)), None)
        counter = _counter(loop)
        if loop is None or counter is None:
            continue
        for step in _steps(loop):
            at = _both(source, loop, counter, call, step)
            if at is not None:
                yield Hit(
                    call, f"at {counter} = {at} (of 0, 1, 2, …) gradients are not synchronised, and the optimizer steps"
                )
                break


def _counter(loop: ast.For | None) -> str | None:
    """The name of an integer loop counter: ``for i in range(…)`` or ``for i, batch in enumerate(…)``."""
    if loop is None or not isinstance(loop.iter, ast.Call):
        return None
    over, target = dotted(loop.iter.func), loop.target
    if over == "enumerate" and len(loop.iter.args) == 1 and not loop.iter.keywords and isinstance(target, ast.Tuple):
        target = target.elts[0]
    elif over != "range" or len(loop.iter.args) != 1:
        return None
    return target.id if isinstance(target, ast.Name) else None


def _steps(loop: ast.For) -> Iterator[ast.Call]:
    for node in ast.walk(loop):
        is_step = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"
        if is_step and isinstance(node, ast.Call) and "opt" in code(node).lower():
            yield node


def _both(source: Source, loop: ast.For, counter: str, no_sync: ast.Call, step: ast.Call) -> int | None:
    """A value of the counter at which both happen, None if there is none or it cannot be told."""
    try:
        for value in range(3 * ACCUMULATION):
            known = {counter: value}
            if _reached(source, loop, no_sync, known) and _reached(source, loop, step, known):
                return value
    except Unknown:
        pass
    return None


def _reached(source: Source, loop: ast.For, node: ast.AST, known: dict[str, int]) -> bool:
    """Is the code at ``node`` run at this value of the counter? Raises Unknown."""
    inner = node
    reached = True
    for outer in source.parents(node):
        if outer is loop:
            return reached
        if isinstance(outer, ast.If | ast.IfExp) and inner is not outer.test:
            body = outer.body if isinstance(outer.body, list) else [outer.body]
            reached = reached and truth(source, outer.test, known, ACCUMULATION) == (inner in body)
        elif isinstance(outer, ast.For | ast.While | ast.FunctionDef | ast.Lambda | ast.Try):
            raise Unknown
        inner = outer
    return reached


def _bypass(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        wrapped = _inner_module(source, call)
        if wrapped is None or without_gradient(source, call) or not _is_trained_on(source, call):
            continue
        scope = source.scope(call)
        if not any(isinstance(c.func, ast.Name) and c.func.id == wrapped for c in source.inside(scope, ast.Call)):
            yield Hit(
                call, f"`{code(call.func)}` goes past the wrapper of `{wrapped}`, whose forward prepares the reduction"
            )


def _inner_module(source: Source, call: ast.Call) -> str | None:
    """The DDP model whose ``.module`` (or a method of it) is called."""
    name = dotted(call.func)
    root, _, rest = name.partition(".")
    if rest != "module" and not rest.startswith("module."):
        return None
    owner: ast.expr = call.func
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    made = resolve(source, owner)
    return (
        root
        if isinstance(made, ast.Call) and source.canonical(made.func).endswith(("DistributedDataParallel", "DDP"))
        else None
    )


def _is_trained_on(source: Source, call: ast.Call) -> bool:
    """True if the result is named and that name's backward is called in the same function."""
    statement = source.statement(call)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return False
    name = statement.targets[0].id
    backwards = (
        c
        for c in source.inside(source.scope(call), ast.Call)
        if isinstance(c.func, ast.Attribute) and c.func.attr == "backward"
    )
    return any(isinstance(part, ast.Name) and part.id == name for c in backwards for part in ast.walk(c))


def _different_start(source: Source) -> Iterator[Hit]:
    names = {source.canonical(call.func).rpartition(".")[2] for call in source.calls}
    wrapped = names & {"DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "fully_shard", "prepare"}
    shared = names & {
        "broadcast",
        "broadcast_object_list",
        "load_state_dict",
        "_sync_module_states",
        "broadcast_coalesced",
    }
    if wrapped or shared or not any(gradient_sums(source)):
        return
    for call in source.calls:
        seeds = source.canonical(call.func) in (
            "torch.manual_seed",
            "torch.cuda.manual_seed",
            "torch.cuda.manual_seed_all",
        )
        if seeds and call.args and any("rank" in dotted(p).lower() for p in ast.walk(call.args[0])):
            yield Hit(
                call,
                f"`{code(call)}` before the model is made gives each rank other weights, and nothing broadcasts them",
            )


RULES = (
    Rule(
        "no_sync_at_step",
        "no_sync skips the reduction of this backward. If it covers the last micro-batch, each rank steps with its own gradients "
        "and the replicas differ from step 0 on, all losses finite.",
        "leave no_sync on the micro-batch that ends with the step: no_sync() if (i + 1) % accumulation else nullcontext()",
        _no_sync,
    ),
    Rule(
        "module_bypass_ddp",
        "DDP arms its reducer in its own forward. A loss computed through .module leaves every gradient unreduced: the replicas "
        "train apart, all losses finite.",
        "compute the loss inside forward and call the wrapper itself",
        _bypass,
    ),
    Rule(
        "no_initial_broadcast",
        "Averaged gradients keep a difference between replicas for ever: they start apart and stay apart, all losses finite.",
        "broadcast the parameters from rank 0 (or seed alike for the model), then seed per rank for the data",
        _different_start,
    ),
)
