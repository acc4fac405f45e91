"""Rules for GradScaler: the order of its calls within one training step, and settings that cannot work."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sentinel.postmortem.lint.expressions import number
from sentinel.postmortem.lint.finding import Hit, Rule
from sentinel.postmortem.lint.source import Scope, Source, code, dotted

SLOWEST_BACKOFF = 0.1
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
_OPTIMIZER = re.compile(r"^(\w*_)?(opt|optim|optimizer)(_\w+|\d+)?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Event:
    """One call that matters to a loss scale."""

    what: str  # backward, plain_backward, unscale, clip, step, plain_step, update
    call: ast.Call
    of: str = ""  # whose step: the optimizer as written


def _events(source: Source, scope: Scope) -> list[_Event]:
    found = (_event(source, call) for call in source.inside(scope, ast.Call))
    # The order of the text is that of the outermost call's start; a backward belongs where its chain ends.
    return sorted((e for e in found if e), key=lambda e: (e.call.end_lineno or 0, e.call.end_col_offset or 0))


def _event(source: Source, call: ast.Call) -> _Event | None:
    name = source.canonical(call.func).rpartition(".")[2]
    if name in _CLIPS:
        return _Event("clip", call)
    if not isinstance(call.func, ast.Attribute):
        return None
    owner, method = call.func.value, call.func.attr
    if method == "backward":
        return _Event("backward" if _is_scaled(owner) else "plain_backward", call)
    is_scaler = "scaler" in dotted(owner).lower()
    if is_scaler and method in ("unscale_", "update"):
        return _Event(method.rstrip("_"), call)
    if is_scaler and method == "step" and call.args:
        return _Event("step", call, code(call.args[0]))
    if method == "step" and _OPTIMIZER.match(dotted(owner).rpartition(".")[2]):
        return _Event("plain_step", call, code(owner))
    return None


def _is_scaled(loss: ast.expr) -> bool:
    """``scaler.scale(loss)``."""
    return (
        isinstance(loss, ast.Call)
        and isinstance(loss.func, ast.Attribute)
        and loss.func.attr == "scale"
        and "scaler" in dotted(loss.func.value).lower()
    )


def _scopes(source: Source) -> Iterator[list[_Event]]:
    scopes: list[Scope] = [source.tree, *source.every(ast.FunctionDef, ast.AsyncFunctionDef)]
    for scope in scopes:
        events = _events(source, scope)
        if any(event.what == "backward" for event in events):
            yield events


def _clip_first(source: Source) -> Iterator[Hit]:
    for events in _scopes(source):
        kinds = [event.what for event in events]
        for place, event in enumerate(events):
            if event.what != "clip" or "backward" not in kinds[:place]:
                continue
            if "unscale" not in kinds[:place] and "step" in kinds[place:]:
                yield Hit(event.call, "clips gradients that still carry the loss scale")


def _plain_step(source: Source) -> Iterator[Hit]:
    for events in _scopes(source):
        kinds = {event.what for event in events}
        if kinds & {"unscale", "step", "plain_backward"}:
            continue
        for event in events:
            if event.what == "plain_step":
                yield Hit(event.call, f"`{event.of}` steps with gradients that still carry the loss scale")


def _update_between(source: Source) -> Iterator[Hit]:
    for events in _scopes(source):
        stepped: set[str] = set()
        updated = False
        for event in events:
            if event.what == "step":
                if updated and stepped and event.of not in stepped:
                    yield Hit(event.call, f"`{event.of}` is unscaled with a scale that update() has already changed")
                stepped.add(event.of)
            elif event.what == "update" and stepped:
                updated = True
            elif event.what in ("backward", "unscale"):
                # A new backward was scaled by the new scale; unscale_ before the update used the old one.
                stepped, updated = (set(), False) if event.what == "backward" else (stepped, updated)


def _scalers(source: Source) -> Iterator[ast.Call]:
    for call in source.calls:
        name = source.canonical(call.func)
        if name.startswith("torch.") and name.endswith("GradScaler"):
            yield call


def _with_bf16(source: Source) -> Iterator[Hit]:
    if source.names_half or _autocast_dtypes(source) != {"torch.bfloat16"}:
        return
    for call in _scalers(source):
        if not any(k.arg == "enabled" for k in call.keywords):
            yield Hit(call, "a loss scale with bfloat16, which has float32's range and needs none")


def _autocast_dtypes(source: Source) -> set[str]:
    """The dtypes autocast is entered with; ``?`` where none is named."""
    found = set()
    for call in source.calls:
        if source.canonical(call.func).rpartition(".")[2] == "autocast":
            named = next((k.value for k in call.keywords if k.arg == "dtype"), None)
            named = named if named is not None or len(call.args) < 2 else call.args[1]
            found.add(source.canonical(named) or "?" if named is not None else "?")
    return found


def _collapse(source: Source) -> Iterator[Hit]:
    for call in _scalers(source):
        factor = next((number(k.value) for k in call.keywords if k.arg == "backoff_factor"), None)
        if factor is not None and 0 < factor < SLOWEST_BACKOFF:
            skips = next(n for n in range(1, 64) if 65536.0 * factor**n < 1.0)
            yield Hit(call, f"a backoff factor of {factor:g} takes the scale from 65536 below 1 in {skips} skips")


RULES = (
    Rule(
        "clip_before_unscale",
        "At a loss scale of 65536 every gradient norm is 65536 times too large: clipping to 1.0 cuts it to 1.0, and the later "
        "unscaling leaves an update of norm 1.5e-5. Nothing becomes NaN; training just stops.",
        "call scaler.unscale_(optimizer) before clipping",
        _clip_first,
        frozenset({"_foreach_norm", "linalg_vector_norm"}),
    ),
    Rule(
        "step_without_unscale",
        "The gradients are scaled by up to 65536 when the optimizer steps: a learning rate of 1e-3 acts like 65.",
        "call scaler.step(optimizer) and scaler.update() instead of optimizer.step()",
        _plain_step,
    ),
    Rule(
        "update_between_steps",
        "The gradients of all optimizers were scaled by the same number. After update() the scaler divides by another one: half "
        "or twice the gradient, or more with a larger growth factor.",
        "step every optimizer first, then call scaler.update() once at the end of the iteration",
        _update_between,
    ),
    Rule(
        "scaler_with_bf16",
        "bfloat16 reaches 3.4e38 and nothing underflows that float32 would keep; the scaler only adds skipped steps, and its "
        "growth to 2^31 and beyond ends in inf.",
        "drop the GradScaler, or GradScaler(enabled=dtype == torch.float16)",
        _with_bf16,
    ),
    Rule(
        "scale_collapse",
        "The scale falls geometrically with each skipped step and grows back only after 2000 good ones: with a factor of 0.001 "
        "three skips take 65536 to 6.6e-5, where every float16 gradient flushes to 0.",
        "leave backoff_factor at 0.5, and look for what overflows",
        _collapse,
        frozenset({"mul", "_amp_foreach_non_finite_check_and_unscale_"}),
    ),
)
