"""Rules for float16: gradients that vanish, sums and casts that overflow, an epsilon that is not there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from sentinel.postmortem.lint.expressions import is_half, number, operation
from sentinel.postmortem.lint.finding import Hit, Rule
from sentinel.postmortem.lint.flow import derivation, resolve
from sentinel.postmortem.lint.source import Source, code

SMALLEST_HALF = 2.0**-25  # below half of float16's smallest positive number everything rounds to 0
_MODEL = re.compile(
    r"model|net\b|network|module|policy|encoder|decoder|backbone|generator|discriminator", re.IGNORECASE
)
_GATES = ("relu", "gelu", "silu", "swish", "leaky_relu", "elu", "softplus", "exp", "square")
_ADAMS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")


def half_modules(source: Source) -> list[ast.Call]:
    """Calls that turn a whole module to float16: ``.half()`` or ``.to(torch.float16)`` of a module or a model."""
    found = []
    for call in source.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("half", "to"):
            narrows = call.func.attr == "half" or any(
                is_half(source, a) for a in (*call.args, *(k.value for k in call.keywords))
            )
            if narrows and _is_module(source, call.func.value):
                found.append(call)
    return found


def _is_module(source: Source, node: ast.expr) -> bool:
    made = resolve(source, node)
    if isinstance(made, ast.Call) and source.canonical(made.func).startswith("torch.nn."):
        return not source.canonical(made.func).startswith("torch.nn.functional")
    return isinstance(node, ast.Name) and bool(_MODEL.search(node.id))


def _half_autocasts(source: Source) -> list[ast.Call]:
    """Autocast regions in float16 by name."""
    return [
        call
        for call in source.calls
        if source.canonical(call.func).rpartition(".")[2] == "autocast"
        and any(is_half(source, a) for a in (*call.args, *(k.value for k in call.keywords)))
    ]


def _trains(source: Source) -> bool:
    methods = {call.func.attr for call in source.calls if isinstance(call.func, ast.Attribute)}
    return {"backward", "step"} <= methods


def _scales_losses(source: Source) -> bool:
    return any(
        "scal" in name.lower()
        for node in source.every(ast.Name, ast.Attribute)
        for name in ((node.id if isinstance(node, ast.Name) else node.attr),)
    )


def _without_scaler(source: Source) -> Iterator[Hit]:
    if _trains(source) and not _scales_losses(source):
        for call in (*half_modules(source), *_half_autocasts(source)):
            yield Hit(call, "trains in float16, and nothing scales the loss")
            return


def _gated(source: Source) -> Iterator[Hit]:
    if not (_half_autocasts(source) and _trains(source)):
        return
    for node in source.every(ast.BinOp):
        if not isinstance(node.op, ast.Mult) or not _is_projected(source, node):
            continue
        for side, other in ((node.left, node.right), (node.right, node.left)):
            gate = operation(source, resolve(source, side))
            if gate is not None and gate.name in _GATES and number(other) is None:
                yield Hit(node, f"`{code(node)}` has no upper bound and goes into a float16 matrix product")
                break


def _is_projected(source: Source, node: ast.AST) -> bool:
    """True if the value is handed to a submodule: ``self.wo(…)``."""
    call = source.parent(node)
    return isinstance(call, ast.Call) and node in call.args and source.canonical(call.func).startswith("self.")


def _narrow_reduction(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        name = source.canonical(call.func).rpartition(".")[2]
        if name in ("MixedPrecisionPolicy", "MixedPrecision"):
            for keyword in call.keywords:
                if keyword.arg == "reduce_dtype" and is_half(source, resolve(source, keyword.value)):
                    yield Hit(keyword.value, "gradients are cast to float16 before they are reduced")
        elif name == "register_comm_hook" and any(
            source.canonical(part).endswith("fp16_compress_hook") for arg in call.args for part in ast.walk(arg)
        ):
            yield Hit(call, "gradients are cast to float16 before they are reduced")


def _vanishing_eps(source: Source) -> Iterator[Hit]:
    if not half_modules(source):
        return
    for call in source.calls:
        name = source.canonical(call.func)
        if not (name.startswith("torch.optim.") and name.rpartition(".")[2] in _ADAMS) or _has_masters(source, call):
            continue
        eps = next((resolve(source, k.value) for k in call.keywords if k.arg == "eps"), None)
        value = 1e-8 if eps is None else number(eps)
        if value is not None and value < SMALLEST_HALF:
            yield Hit(call, f"eps={value:g} rounds to 0 in float16: 0/0 for a parameter without gradient")


def _has_masters(source: Source, call: ast.Call) -> bool:
    """True if the parameters handed over are float32 copies."""
    return any(
        isinstance(part, ast.Attribute) and part.attr in ("float", "float32")
        for arg in call.args
        for part in derivation(source, arg)
    )


RULES = (
    Rule(
        "fp16_autocast",
        "A gated activation multiplies two unbounded values; a few hundred times a few hundred is past float16's 65504, and the "
        "matrix product after it sums thousands of such terms. inf - inf in the next layer is NaN.",
        "run this block in bfloat16, or in float32: with torch.autocast(device, enabled=False)",
        _gated,
        frozenset({"addmm", "mm", "bmm", "linear", "mul", "_to_copy"}),
    ),
    Rule(
        "fp16_without_scaler",
        "float16 has nothing below 6e-8: gradients of 1e-8 flush to 0, the weights never move, and no NaN tells.",
        "use torch.amp.GradScaler, or bfloat16, which needs no scaling",
        _without_scaler,
    ),
    Rule(
        "reduce_dtype_fp16",
        "A gradient of 70000 is finite in float32 and inf after the cast to float16; the reduction spreads it to every rank.",
        "reduce in float32 or bfloat16: reduce_dtype=torch.float32",
        _narrow_reduction,
        frozenset({"chunk_cat", "_to_copy", "_reduce_scatter_base_", "reduce_scatter_tensor", "copy_"}),
    ),
    Rule(
        "adam_eps_half",
        "Adam divides by sqrt(v) + eps. In float16 1e-8 rounds to 0 and so does the square of any gradient below 2e-4: 0/0 = NaN.",
        "keep float32 parameters and use autocast, or give eps=1e-4",
        _vanishing_eps,
        frozenset({"addcdiv_", "_foreach_addcdiv_", "div", "_fused_adam_", "_fused_adamw_"}),
    ),
)
