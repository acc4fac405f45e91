"""Tap on optimizers: a global hook before and after every step, and their construction.

Owns the hooks and the wrapping of closures: Lightning and LBFGS run backward *inside* ``step(closure)``, so the round is judged
when the closure returns. What a step means is the ledger's business.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sentinel.wire.messages import Guarded
from sentinel_agent.errors import Health
from sentinel_agent.patching import wrap

_handles: list[RemovableHandle] = []


def install(
    on_step: Callable[[torch.optim.Optimizer, bool], Guarded | None],
    on_made: Callable[[torch.optim.Optimizer], None],
    health: Health,
    intervene: Callable[[Guarded, torch.optim.Optimizer, bool], None] = lambda *_: None,
    on_stepped: Callable[[torch.optim.Optimizer], None] = lambda _: None,
) -> None:
    """Call ``on_step(optimizer, again)`` once its gradients are ready and before it uses them, ``on_stepped`` when it has;
    ``on_made`` after construction.

    ``again`` is True from the second evaluation of a closure within one step on. Where ``on_step`` says skipped or halted,
    ``intervene(decision, optimizer, inside)`` is called, which may raise into the user's own call; ``inside``: the step is running.
    """
    step = health.guarded("optimizer", on_step)
    made = health.guarded("optimizer_made", on_made)

    def judge(optimizer: torch.optim.Optimizer, again: bool, inside: bool) -> None:
        decided = step(optimizer, again)
        if decided in (Guarded.SKIPPED, Guarded.HALTED):
            intervene(decided, optimizer, inside)

    def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            judge(optimizer, False, False)
            return None
        judged = _judged_after(closure, lambda again: judge(optimizer, again, True))
        return (args, {**kwargs, "closure": judged}) if "closure" in kwargs else ((args[0], judged, *args[2:]), kwargs)

    vars(before_step)["_torchdynamo_disable"] = True  # a compiled step calls it, outside of what it compiles
    stepped = health.guarded("optimizer_stepped", on_stepped)

    def after_step(optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        stepped(optimizer)

    vars(after_step)["_torchdynamo_disable"] = True
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(before_step))
        _handles.append(register_optimizer_step_post_hook(after_step))
    wrap(torch.optim.Optimizer, "__init__", lambda original: _then(original, made))


def uninstall() -> None:
    """Remove the hooks."""
    while _handles:
        _handles.pop().remove()


def _judged_after(closure: Callable[[], Any], judge: Callable[[bool], Any]) -> Callable[[], Any]:
    evaluations = 0

    @functools.wraps(closure)
    def call() -> Any:
        nonlocal evaluations
        result = closure()
        judge(evaluations > 0)
        evaluations += 1
        return result

    return call


def _then(original: Callable[..., None], made: Callable[[Any], Any]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made(self)

    return init
