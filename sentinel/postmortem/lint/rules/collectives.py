"""Rules for collectives: sums that overflow or are never divided, groups of one rank, calls that not every rank makes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from sentinel.postmortem.lint.expressions import identifiers, is_half, number, operation
from sentinel.postmortem.lint.finding import Hit, Rule
from sentinel.postmortem.lint.flow import derivation, resolve
from sentinel.postmortem.lint.guards import is_guarded
from sentinel.postmortem.lint.rules.division import divisions, is_compression
from sentinel.postmortem.lint.rules.precision import half_modules
from sentinel.postmortem.lint.source import Source, code, dotted, same

COLLECTIVES = frozenset(
    [
        "all_reduce",
        "broadcast",
        "barrier",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "scatter",
    ]
)
_WORLD = re.compile(
    r"world|num_(replicas|workers|ranks|processes|gpus)|get_world_size|n_?gpus?|dp_?size|size", re.IGNORECASE
)
_RANK = re.compile(
    r"(^|_)rank$|get_(global_)?rank$|^is_(main|master|rank_?zero|global_zero)\w*$|(^|_)rank_?0$", re.IGNORECASE
)


def _is_distributed(source: Source, call: ast.Call, *names: str) -> bool:
    full = source.canonical(call.func)
    return full.startswith("torch.distributed.") and full.rpartition(".")[2] in names


def gradient_sums(source: Source) -> Iterator[ast.Call]:
    """``all_reduce(p.grad)`` with SUM over the whole world."""
    return (call for call in source.calls if _sums(source, call) and "grad" in set(identifiers(call.args[0])))


def _sums(source: Source, call: ast.Call) -> bool:
    if not _is_distributed(source, call, "all_reduce") or not call.args or _in_a_group(call):
        return False
    op = call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "op"), None)
    return op is None or dotted(op).endswith("ReduceOp.SUM")


def _in_a_group(call: ast.Call) -> bool:
    return len(call.args) > 2 or any(k.arg == "group" for k in call.keywords)


def _divides_by_world(source: Source) -> bool:
    """True if anything is divided by the number of ranks, anywhere in the file."""
    for _, _, by in divisions(source):
        if any(isinstance(p, ast.Name | ast.Attribute) and _WORLD.search(dotted(p)) for p in ast.walk(by)):
            return True
    for call in source.calls:
        op = operation(source, call)
        if op is not None and op.name in ("mul_", "mul") and op.arguments and "world" in code(op.arguments[0], 400):
            return True
    return False


def _half_sum(source: Source) -> Iterator[Hit]:
    if not _divides_by_world(source):
        return
    in_half = set(gradient_sums(source)) if half_modules(source) else set()
    for call in source.calls:
        narrowed = _sums(source, call) and _is_narrowed(source, call.args[0])
        if (call in in_half or narrowed) and not _was_divided(source, call):
            yield Hit(call, "sums float16 gradients over all ranks before dividing")


def _is_narrowed(source: Source, node: ast.expr) -> bool:
    """True if the value was cast to float16 here and not divided on its way."""
    op = operation(source, resolve(source, node))
    casts = op is not None and (
        op.name == "half" or (op.name == "to" and any(is_half(source, a) for a in op.arguments))
    )
    return casts and not any(isinstance(part, ast.Div) for part in derivation(source, node))


def _was_divided(source: Source, call: ast.Call) -> bool:
    """True if the gradient was divided above the reduction, in the same function."""
    return any(
        (getattr(node, "lineno", 0) < call.lineno and same(divided, call.args[0]))
        for node, divided, _ in divisions(source)
        if source.scope(node) is source.scope(call)
    )


def _undivided_sum(source: Source) -> Iterator[Hit]:
    if not _divides_by_world(source):
        for call in gradient_sums(source):
            yield Hit(call, "sums the gradients of all ranks, and nothing divides by their number")


def _group_of_one(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        name = source.canonical(call.func).rpartition(".")[2]
        wrapped = name in ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard")
        for keyword in call.keywords if wrapped else ():
            if keyword.arg == "process_group" and _has_new_group_of_one(source, keyword.value):
                yield Hit(
                    keyword.value, f"`{code(keyword.value)}` holds a single rank, so gradients are never averaged"
                )
            elif keyword.arg == "mesh" and _is_mesh_of_one(source, keyword.value):
                yield Hit(keyword.value, f"dimension `{code(keyword.value)}` of the mesh holds a single rank")


def _has_new_group_of_one(source: Source, node: ast.expr) -> bool:
    for part in derivation(source, node):
        if isinstance(part, ast.Call) and _is_distributed(source, part, "new_group"):
            ranks = part.args[0] if part.args else next((k.value for k in part.keywords if k.arg == "ranks"), None)
            if isinstance(ranks, ast.List) and len(ranks.elts) == 1 and not isinstance(ranks.elts[0], ast.Starred):
                return True
    return False


def _is_mesh_of_one(source: Source, node: ast.expr) -> bool:
    """``mesh["shard"]`` of a mesh whose dimension of that name has size 1."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
        return False
    made = resolve(source, node.value)
    if (
        not isinstance(made, ast.Call)
        or not source.canonical(made.func).endswith("init_device_mesh")
        or len(made.args) < 2
    ):
        return False
    names = next((k.value for k in made.keywords if k.arg == "mesh_dim_names"), None)
    if not isinstance(made.args[1], ast.Tuple) or not isinstance(names, ast.Tuple):
        return False
    sizes = {
        n.value: number(s) for n, s in zip(names.elts, made.args[1].elts, strict=False) if isinstance(n, ast.Constant)
    }
    return sizes.get(node.slice.value) == 1


def _under_rank(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        if (
            not _is_distributed(source, call, *COLLECTIVES)
            or _in_a_group(call)
            or any(k.arg == "group" for k in call.keywords)
        ):
            continue
        branch = _rank_branch(source, call)
        if branch is None or _is_matched(source, call):
            continue
        name = dotted(call.func).rpartition(".")[2]
        yield Hit(call, f"`{name}` is called only where `{code(branch.test)}`: the other ranks never join")


def _rank_branch(source: Source, call: ast.Call) -> ast.If | None:
    inner: ast.AST = call
    for outer in source.parents(call):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return None
        if isinstance(outer, ast.If) and inner is not outer.test and _asks_rank(outer.test):
            return outer
        inner = outer
    return None


def _asks_rank(test: ast.expr) -> bool:
    """``rank == 0``, ``get_rank() != 0``, ``is_main_process()``, alone: with an ``or`` or another condition nobody can tell."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _asks_rank(test.operand)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        known = number(test.comparators[0]) is not None
        return known and isinstance(test.ops[0], ast.Eq | ast.NotEq | ast.Gt | ast.Lt) and _asks_rank(test.left)
    name = dotted(test.func if isinstance(test, ast.Call) else test).rpartition(".")[2]
    return bool(name) and bool(_RANK.search(name))


def _is_matched(source: Source, call: ast.Call) -> bool:
    """True if the same collective is called in the function under another condition on the rank: rank 0 first, then the rest."""
    name = source.canonical(call.func)
    others = (c for c in source.inside(source.scope(call), ast.Call) if c is not call)
    return any(source.canonical(other.func) == name and _depends_on_rank(source, other) for other in others)


def _depends_on_rank(source: Source, call: ast.Call) -> bool:
    tests = (outer.test for outer in source.parents(call) if isinstance(outer, ast.If))
    return any(_RANK.search(name) for test in tests for name in identifiers(test))


def _low_rank(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        if source.canonical(call.func).rpartition(".")[2] == "PowerSGDState":
            eps = next((k.value for k in call.keywords if k.arg == "orthogonalization_epsilon"), None)
            spread = any(k.arg is None for k in call.keywords)  # **options may name it
            if (eps is None and not spread) or number(eps) == 0:
                yield Hit(call, "orthogonalization_epsilon is 0 (its default)")
    for node, _, by in divisions(source):
        op = operation(source, resolve(source, by))
        divides = op is not None and op.name in ("norm", "vector_norm") and not is_guarded(source, by)
        if op is not None and divides and is_compression(source, node):
            yield Hit(node, f"divides by `{code(op.call)}`, which is 0 for an all-zero gradient")


RULES = (
    Rule(
        "sum_before_divide_fp16",
        "Each rank's gradient is below 65504 and their sum is not: with 8 ranks 8200 each is enough. The result is inf on every "
        "rank, and no rank is at fault.",
        "divide before reducing (p.grad /= world_size), reduce in float32, or use ReduceOp.AVG where the backend has it",
        _half_sum,
        frozenset({"allreduce_", "all_reduce", "allreduce_coalesced_"}),
    ),
    Rule(
        "sum_without_divide",
        "The gradient is the sum over ranks: with N ranks the learning rate is N times the one that was tuned, and beyond the "
        "stable one the loss grows geometrically to inf.",
        "divide by dist.get_world_size() after the reduction, or use ReduceOp.AVG",
        _undivided_sum,
        frozenset({"allreduce_", "mse_loss", "all_reduce"}),
    ),
    Rule(
        "trivial_group",
        "A reduction over one rank returns what it was given: the replicas drift apart from the first step, all losses finite.",
        "wrap with the group (or mesh dimension) that spans the replicas",
        _group_of_one,
    ),
    Rule(
        "collective_under_rank_condition",
        "The ranks that skip the call pair their next collective with it: other tensors are added together, or everyone waits "
        "for the timeout.",
        "call collectives on all ranks; only what is done with the result belongs under the condition",
        _under_rank,
    ),
    Rule(
        "powersgd_eps_zero",
        "Orthogonalisation divides each column by its norm. A parameter without gradient (a frozen or unused branch) has a zero "
        "column: 0/0 = NaN between two collectives, although every local gradient is finite.",
        "add an epsilon to the norm; for torch's PowerSGD: orthogonalization_epsilon=1e-8",
        _low_rank,
        frozenset({"div", "linalg_qr", "div_"}),
    ),
)
