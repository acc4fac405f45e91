"""Tap on DDP's join: a rank that has run out of input shadows the others' reductions.

Owns the patch of the hook that does it once for each of the others' backwards. Without it a joined rank's rounds stand still while
the others' go on, and from then on equal numbers mean different rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sentinel_agent.errors import Health
from sentinel_agent.patching import wrap


def install(module: Any, shadowed: Callable[[], None], health: Health) -> None:
    """Patch ``_DDPJoinHook`` in torch.nn.parallel.distributed; ``shadowed`` hears of each backward that reduced gradients."""
    told = health.guarded("shadow", shadowed)
    if hasattr(module, "_DDPJoinHook"):
        wrap(module._DDPJoinHook, "main_hook", lambda original: _noted(original, told))


def _noted(original: Callable[[Any], None], told: Callable[[], None]) -> Callable[[Any], None]:
    def main_hook(hook: Any) -> None:
        original(hook)
        if hook.ddp.require_forward_param_sync:  # the hook sets it to whether the others reduce this time
            told()

    return main_hook
