"""Tap on gradient clipping: outstanding checks are finished before it writes the gradients.

Owns the patches of ``torch.nn.utils``; clipping itself is untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sentinel_agent.errors import Health
from sentinel_agent.patching import wrap

NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


def install(before_clip: Callable[[], None], health: Health) -> None:
    """Call ``before_clip()`` before each of the clipping functions, under every name users import them from."""
    ready = health.guarded("clip", before_clip)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(*args: Any, **kwargs: Any) -> Any:
            ready()
            return original(*args, **kwargs)

        return clip

    for name in NAMES:
        wrap(torch.nn.utils.clip_grad, name, make)
        wrap(torch.nn.utils, name, make)
    wrap(torch.amp.GradScaler, "unscale_", make)
