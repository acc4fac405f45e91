"""Tap on ``torch.amp.GradScaler``: which steps it leaves out, at which scale, which loss was scaled, and calls in a wrong order.

Owns the patches of the class and what they remember. An unfused scaler that finds inf never calls ``optimizer.step``, so the
optimizer's hook alone would miss the skip; a fused optimizer is called, with ``found_inf`` set.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import OptState

from sentinel_agent.errors import Health
from sentinel_agent.patching import wrap


class Listener(Protocol):
    """What the tap tells; each call goes through the health's guard."""

    def scaler_skipped(self, optimizer: torch.optim.Optimizer, scale: float | None) -> None:
        """The scaler left the step of ``optimizer`` out."""

    def misused(self, note: str, optimizer: torch.optim.Optimizer | None) -> None:
        """A call in an order that scales, clips or steps wrongly; ``note`` is a key of the coordinator's reasons."""


class ScalerTap:
    """State of the GradScaler calls of this iteration.

    ``scale`` of an accelerator's scaler is read after its own step has synchronised; nothing here adds a host sync before that.
    """

    def __init__(self, listener: Listener, health: Health) -> None:
        self._skipped = health.guarded("scaler", listener.scaler_skipped)
        self._misused = health.guarded("misuse", listener.misused)
        self._health = health
        self._scaler: weakref.ref[Any] | None = None  # that scaled a loss since the round began
        self._scale_used: float | None = None  # at the last ``scale`` call
        self._stepping: int | None = None
        self._scale: float | None = None
        self._called = False
        self._scaled: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None
        self._plain_losses = 0
        self._scaled_losses = 0
        self.autocast_dtype: torch.dtype | None = None  # of the last root forward

    def install(self) -> None:
        """Patch ``GradScaler.step`` and ``.scale``."""
        wrap(torch.amp.GradScaler, "step", self._step)
        wrap(torch.amp.GradScaler, "scale", self._scale_outputs)

    def round_closed(self) -> None:
        """Losses scaled so far belong to the round that is over."""
        self._scaler = None
        self._plain_losses = self._scaled_losses = 0

    def unscaled(self, tensor: torch.Tensor) -> torch.Tensor:
        """The loss behind ``tensor``, if ``tensor`` is what the scaler last returned for it."""
        if self._scaled is not None and self._scaled[0]() is tensor:
            self._scaled_losses += 1
            return self._scaled[1]
        self._plain_losses += 1
        return tensor

    def state(self) -> dict[str, float] | None:
        """Numbers of the scaler that scaled this round's loss, None without one. Reads them from the device."""
        scaler = self._scaler() if self._scaler is not None else None
        return {name: float(value) for name, value in scaler.state_dict().items()} if scaler is not None else None

    def about_to_step(self, optimizer: torch.optim.Optimizer) -> tuple[float | None, bool]:
        """(scale, skipped) of the step that ``optimizer`` is asked to make now; (None, False) outside of a scaler."""
        if self._stepping == id(optimizer):
            self._called = True
            found = getattr(optimizer, "found_inf", None)
            return self._scale, bool(found is not None and float(found) > 0)
        if self._scaled_losses and not self._plain_losses and self._is_scaled(optimizer):
            self._misused("step_without_unscale", optimizer)
        return None, False

    def clipping(self, parameters: list[torch.Tensor], optimizers: list[torch.optim.Optimizer]) -> None:
        """Gradients of ``parameters`` are about to be clipped."""
        clipped = {id(p) for p in parameters}
        for optimizer in optimizers:
            owns = any(id(p) in clipped for group in optimizer.param_groups for p in group["params"])
            if owns and self._is_scaled(optimizer):
                self._misused("clip_before_unscale", optimizer)
                return

    def _is_scaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Are this optimizer's gradients still multiplied by a scale other than one?"""
        scaler = self._scaler() if self._scaler is not None else None
        if scaler is None or self._scale_used in (None, 1.0):
            return False
        state = dict(scaler._per_optimizer_states).get(id(optimizer))
        return state is None or state["stage"] is OptState.READY

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        before = self._health.guarded("scaler_step", self._before_step)

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not scaler._enabled or not self._health.active:
                return original(scaler, optimizer, *args, **kwargs)
            self._stepping, self._called, self._scale = id(optimizer), False, None
            before(scaler, optimizer)
            try:
                result = original(scaler, optimizer, *args, **kwargs)
                if not self._called:
                    self._skipped(optimizer, self._scale)
                return result
            finally:
                self._stepping = None

        return step

    def _before_step(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scale = scaler.get_scale()
        if self._scale_used is not None and self._scale != self._scale_used:
            self._misused("scale_changed_before_step", optimizer)

    def _scale_outputs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        remember = self._health.guarded("scaler_scale", self._remember_scaled)

        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            if scaler._enabled:
                remember(scaler, outputs, result)
            return result

        return scale

    def _remember_scaled(self, scaler: Any, outputs: Any, result: Any) -> None:
        self._scaler = weakref.ref(scaler)
        self._scale_used = scaler.get_scale() if scaler._scale.device.type == "cpu" else None
        if isinstance(result, torch.Tensor) and isinstance(outputs, torch.Tensor):
            self._scaled = (weakref.ref(result), outputs.detach())
        if self.autocast_dtype is torch.bfloat16:
            self._misused("scaler_with_bfloat16", None)
