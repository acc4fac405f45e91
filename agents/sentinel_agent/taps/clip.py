"""Tap on gradient clipping: outstanding checks are finished before it writes the gradients, and the norm it finds is looked at.

Owns the patches of ``torch.nn.utils``; clipping itself is untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from sentinel_agent.errors import Health
from sentinel_agent.patching import wrap

NAMES = ("clip_grad_norm_", "clip_grad_value_")


def install(
    before_clip: Callable[[list[torch.Tensor]], None],
    after_clip: Callable[[list[torch.Tensor], Any], None],
    join: Callable[[], None],
    unscaled: Callable[[torch.optim.Optimizer], None],
    health: Health,
) -> None:
    """Call ``before_clip(parameters)`` and ``after_clip(parameters, norm)`` around clipping, ``join()`` before and
    ``unscaled(optimizer)`` after any unscaling.
    """
    before, after, ready, done = (
        health.guarded("clip", before_clip),
        health.guarded("clipped", after_clip),
        health.guarded("unscale", join),
        health.guarded("unscaled", unscaled),
    )

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(parameters, Iterator):
                parameters = list(parameters)  # a generator can be read once
            seen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            before(seen)
            result = original(parameters, *args, **kwargs)
            after(seen, result)
            return result

        return clip

    def make_unscale(original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_(scaler: Any, optimizer: torch.optim.Optimizer) -> Any:
            ready()
            result = original(scaler, optimizer)
            done(optimizer)
            return result

        return unscale_

    for name in NAMES:
        wrap(torch.nn.utils.clip_grad, name, make)
        wrap(torch.nn.utils, name, make)
    wrap(torch.amp.GradScaler, "unscale_", make_unscale)
