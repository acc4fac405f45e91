"""The clock: which step of the user's loop a round was.

Owns the counter of steps and whose rounds count. The *leader* is the first optimizer that stepped; its rounds are the iterations.
The rounds of others (a GAN's second player) belong to the iteration that the leader has just counted.
"""

from __future__ import annotations

import weakref

import torch


class Clock:
    """Counts the leader's rounds, skipped ones included. ``step`` is 0-based, what the script's loop counter would say."""

    def __init__(self) -> None:
        self._steps = 0
        self._leader: weakref.ref[torch.optim.Optimizer] | None = None
        self._loader_seen = False
        self._fetched = True

    @property
    def step(self) -> int:
        """The iteration that is running, as far as is known before its round closes."""
        return self._steps

    def leads(self, optimizer: torch.optim.Optimizer) -> bool:
        """Is this optimizer the leader? The first is; so is one that takes over the leader's parameters, or its place."""
        leader = self._leader() if self._leader is not None else None
        if leader is None or (leader is not optimizer and _share_parameters(leader, optimizer)):
            self._leader = weakref.ref(optimizer)
            return True
        return leader is optimizer

    def step_of(self, optimizer: torch.optim.Optimizer | None, *, again: bool = False) -> int:
        """Step of a round that this optimizer closes (None: nobody's in particular). ``again``: not its first in this step."""
        if again or (optimizer is not None and not self.leads(optimizer)):
            return max(self._steps - 1, 0)
        return self._steps

    def closed(self, optimizer: torch.optim.Optimizer | None, *, again: bool = False) -> None:
        """A round was closed: the leader's count."""
        if not again and (optimizer is None or self.leads(optimizer)):
            self._steps += 1

    def batch_fetched(self) -> None:
        """A DataLoader gave a batch: a new iteration may begin."""
        self._loader_seen = self._fetched = True

    def backward_ended(self) -> None:
        """Gradients are there; those of the next iteration will be of another batch."""
        self._fetched = False

    @property
    def may_be_over(self) -> bool:
        """Cleared gradients end an iteration, unless the loop uses a DataLoader and has fetched nothing since the backward."""
        return self._fetched or not self._loader_seen


def _share_parameters(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    mine = {id(p) for group in one.param_groups for p in group["params"]}
    return any(id(p) in mine for group in other.param_groups for p in group["params"])
