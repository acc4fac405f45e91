"""Makes one call of an optimizer's step a no-op: its gradients are away while it runs, and back when it returns.

Owns the gradients that are away. A parameter without a gradient is left alone by every optimizer, state included, whereas one
with a gradient of zeros decays, moves by its momentum and counts a step. Ours is the last hook before the step and the first after
it, so that the user's own hooks find gradients where they expect them; what the user does next (``p.grad.zero_()``) finds them too.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

Taken = list[tuple[torch.Tensor, torch.Tensor]]


class Withheld:
    """Gradients by optimizer. ``arm`` before a step's own hooks run, or ``take`` inside of the step."""

    def __init__(self) -> None:
        self._armed: set[int] = set()
        self._away: dict[int, Taken] = {}
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[RemovableHandle, RemovableHandle]] = (
            weakref.WeakKeyDictionary()
        )

    def arm(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the gradients away after the last of the optimizer's hooks, before the step that is about to run."""
        self._hook(optimizer)
        self._armed.add(id(optimizer))

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the gradients away now: the step is running, and its closure has just made them."""
        self._hook(optimizer)
        away = self._away.setdefault(id(optimizer), [])
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                away.append((parameter, parameter.grad))
                parameter.grad = None

    def give_back(self, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Put gradients back that are away (of all optimizers, where none is named), but over no new ones. Returns how many."""
        names = list(self._away) if optimizer is None else [id(optimizer)]
        self._armed.difference_update(names)
        back = [pair for name in names for pair in self._away.pop(name, [])]
        for parameter, gradient in back:
            if parameter.grad is None:
                parameter.grad = gradient
        return len(back)

    def uninstall(self) -> None:
        """Remove every hook."""
        self.give_back()
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        self._hooks.clear()

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        """Hooks of this optimizer: the last before its step, the first after. No hook of it runs at this moment."""
        if optimizer not in self._hooks:
            self._hooks[optimizer] = (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            )
        before, after = self._hooks[optimizer]
        hooks: Any = optimizer  # torch declares them as dict; they are ordered ones
        hooks._optimizer_step_pre_hooks.move_to_end(before.id)
        hooks._optimizer_step_post_hooks.move_to_end(after.id, last=False)

    def _before(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in self._armed:
            self._armed.discard(id(optimizer))
            self.take(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.give_back(optimizer)
