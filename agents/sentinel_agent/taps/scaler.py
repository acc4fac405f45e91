"""Tap on ``torch.amp.GradScaler``: which steps it leaves out, at which scale, and which loss was scaled.

Owns the patches of the class. An unfused scaler that finds inf never calls ``optimizer.step``, so the optimizer's hook alone
would miss the skip; a fused optimizer is called, with ``found_inf`` set.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from sentinel_agent.errors import Health
from sentinel_agent.patching import wrap


class ScalerTap:
    """Scale and step state of the GradScaler call that is running, if any."""

    def __init__(self, on_skip: Callable[[torch.optim.Optimizer, float | None], None], health: Health) -> None:
        self._on_skip = health.guarded("scaler", on_skip)
        self._health = health
        self._stepping: int | None = None
        self._scale: float | None = None
        self._called = False
        self._scaled: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None

    def install(self) -> None:
        """Patch ``GradScaler.step`` and ``.scale``."""
        wrap(torch.amp.GradScaler, "step", self._step)
        wrap(torch.amp.GradScaler, "scale", self._scale_outputs)

    def scale_of(self, optimizer: torch.optim.Optimizer) -> tuple[float | None, bool]:
        """(scale, skipped) of the step that ``optimizer`` is asked to make now; (None, False) outside of a scaler."""
        if self._stepping != id(optimizer):
            return None, False
        self._called = True
        found = getattr(optimizer, "found_inf", None)
        return self._scale, bool(found is not None and float(found) > 0)

    def unscaled(self, tensor: torch.Tensor) -> torch.Tensor:
        """The loss behind ``tensor``, if ``tensor`` is what the scaler last returned for it."""
        if self._scaled is not None and self._scaled[0]() is tensor:
            return self._scaled[1]
        return tensor

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not scaler._enabled or not self._health.active:
                return original(scaler, optimizer, *args, **kwargs)
            self._stepping, self._called, self._scale = id(optimizer), False, scaler.get_scale()
            try:
                result = original(scaler, optimizer, *args, **kwargs)
                if not self._called:
                    self._on_skip(optimizer, self._scale)
                return result
            finally:
                self._stepping = None

        return step

    def _scale_outputs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            if isinstance(result, torch.Tensor) and isinstance(outputs, torch.Tensor):
                self._scaled = (weakref.ref(result), outputs.detach())
            return result

        return scale
