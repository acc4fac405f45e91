"""What is patched in torch so that a session hears of everything and decides what runs.

Owns the patches; each only asks the session. In the forward phase a forward runs without a graph, a backward fills in zeros, and
optimizers and scalers do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from sentinel_agent import process
from sentinel_agent.inject.hooks import prepare
from sentinel_agent.patching import wrap
from sentinel_agent.replay.rebuild import NotRebuildable
from sentinel_agent.replay.session import Session
from sentinel_agent.taps import optimizer as optimizer_tap


def install(session: Session) -> None:
    """Patch torch for the rest of this process."""
    process.stand_in(session)
    session.world.install(session.process_group_made)  # first: what is wrapped once is not wrapped again
    prepare()
    session.override.install()
    wrap(nn.Module, "__call__", lambda original: _module_call(original, session))
    wrap(torch.autograd, "backward", lambda original: _backward(original, session))
    wrap(dataloader._BaseDataLoaderIter, "__next__", lambda original: _next_batch(original, session))
    _optimizers(session)
    wrap(torch.amp.GradScaler, "__init__", lambda original: _scaler_init(original, session))
    for name in ("step", "update", "unscale_"):
        wrap(torch.amp.GradScaler, name, functools.partial(_scaler_call, name, session))


def _module_call(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Every module's call: roots are fed and run without a graph before the recorded round; all are on the module stack."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        modules = session.modules
        outermost = modules.depth == 0 and not torch.compiler.is_compiling()
        if outermost and torch.is_grad_enabled() and next(self.parameters(), None) is not None:
            return _root_call(original, session, self, args, kwargs)
        modules.enter(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            modules.leave()

    return call


def _root_call(original: Callable[..., Any], session: Session, root: nn.Module, args: Any, kwargs: Any) -> Any:
    args, kwargs = session.forward_begins(root, args, kwargs)
    session.modules.enter(root)
    try:
        if session.forwarding and session.fast:
            with torch.no_grad():
                return original(root, *args, **kwargs)
        with session.override.around_forward():
            output = original(root, *args, **kwargs)
        return session.override.widened(output)
    finally:
        session.modules.leave()


def _backward(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tensors, *args, **kwargs) if session.backward_begins(tensors) else None
        session.backward_ended()
        return result

    return backward


def _next_batch(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:
        if not session.batch_wanted():
            return original(self)
        try:
            return session.next_batch()
        except NotRebuildable as error:
            session.notes.append(f"the recorded batch cannot be built: {error}")
            return original(self)

    return __next__


def _optimizers(session: Session) -> None:
    """Rounds close at steps; before the recorded round, a step finds no gradients and so changes nothing."""
    kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def before(optimizer: torch.optim.Optimizer, _again: bool) -> None:
        session.clock.stepped("the optimizer was about to step")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kept[id(optimizer)] = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter in parameters:
            parameter.grad = None

    def after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter, gradient in kept.pop(id(optimizer), ()):
            parameter.grad = gradient

    optimizer_tap.install(before, session.optimizer_made, session.health)
    register_optimizer_step_post_hook(after)


def _scaler_init(original: Callable[..., None], session: Session) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not session.override.scales_gradients:
            kwargs["enabled"] = False
        original(self, *args, **kwargs)
        scale = session.recording.header.loss_scale
        if scale is not None and self._enabled:
            self._init_scale = scale

    return init


def _scaler_call(name: str, session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` closes the round; before the recorded round's first forward, no call does anything to the scale or gradients."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._enabled:
            return original(self, *args, **kwargs)
        if name == "step":
            session.clock.stepped("the scaler was about to step")
            return None
        if session.live_forwards == 0:
            return None
        return original(self, *args, **kwargs)

    return call
