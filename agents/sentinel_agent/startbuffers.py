"""Buffers as they were when the round began: BatchNorm and its like change them in the forward that a replay wants to repeat.

Owns the copies and their budget. Taken at the end of every round, so it must be cheap: a model with more bytes of buffers than the
budget is not copied at all, and its bundle holds buffers as they are when it is written.
"""

from __future__ import annotations

import weakref
from typing import Final

import torch
from torch import Tensor

from sentinel_agent.check import is_nonfinite
from sentinel_agent.contents import is_readable, local
from sentinel_agent.naming import Naming

BUDGET: Final = 8 << 20  # bytes
RENEWED_EVERY: Final = 64  # rounds after which the modules are searched for buffers again


class StartBuffers:
    """Copies of the buffers of the watched modules."""

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._known: list[tuple[str, weakref.ref[Tensor]]] = []
        self._copies: list[tuple[str, Tensor]] = []
        self._turn = 0

    @torch.no_grad()
    def take(self) -> None:
        """Copy every buffer now; forgets all if they are over the budget."""
        if self._turn % RENEWED_EVERY == 0:
            self._known = [(name, weakref.ref(buffer)) for name, buffer in self._naming.buffers()]
        self._turn += 1
        alive = [(name, local(b).detach()) for name, ref in self._known if (b := ref()) is not None]
        readable = [(name, buffer) for name, buffer in alive if is_readable(buffer)]
        if len(alive) != len(self._known):
            self._turn = 0  # some were replaced: search again next time
        over = sum(buffer.nbytes for _, buffer in readable) > BUDGET
        self._copies = [] if over else [(name, buffer.clone()) for name, buffer in readable]

    @torch.no_grad()
    def restore_nonfinite(self) -> int:
        """Put back every nonfinite buffer whose copy is finite. Returns how many nonfinite ones have no such copy."""
        copies, left = dict(self._copies), 0
        for name, buffer in self._naming.buffers():
            if not is_nonfinite(buffer):
                continue
            copy = copies.get(name)
            if copy is None or copy.shape != local(buffer).shape or is_nonfinite(copy):
                left += 1
            else:
                local(buffer).copy_(copy)
        return left

    def named(self) -> list[tuple[str, Tensor]]:
        """(name, copy) of every buffer, empty if there are none or too many bytes of them."""
        return list(self._copies)
