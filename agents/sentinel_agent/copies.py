"""Which parameters a rank need not write, since others write the same: replicas of a large job.

Owns that choice, made by every rank alone and alike. What is left out is named in the part with a fingerprint, so that whoever
takes another rank's copy can see that it is one.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from sentinel.bundle.manifest import Copies
from sentinel_agent.contents import local
from sentinel_agent.fingerprint import fingerprint
from sentinel_agent.tensorfile import storable

COPIES_FROM = 5
"""Ranks from which on the replicas of a job are written by some for all; below, each rank's own costs little."""


def writers(world_size: int) -> tuple[int, ...]:
    """The ranks that write replicated state whatever they saw: the first and the last, which no common node takes away."""
    return (0, world_size - 1)


def left_to_others(rank: int, world_size: int, *, suspect: bool, replicated: Iterable[str]) -> frozenset[str]:
    """Names that this rank leaves out. A rank that saw something of its own writes everything: its state may be the odd one."""
    if world_size < COPIES_FROM or suspect or rank in writers(world_size):
        return frozenset()
    return frozenset(replicated)


def described(world_size: int, left_out: Iterable[tuple[str, Tensor]]) -> Copies | None:
    """What a part says of the tensors it leaves out; None if it leaves out nothing."""
    tensors = [(name, local(tensor).detach()) for name, tensor in left_out]
    if not tensors:
        return None
    names = tuple(name for name, _ in tensors)
    return Copies(ranks=writers(world_size), names=names, fingerprint=fingerprint_of(tensors))


def fingerprint_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """Fingerprint of tensors in the order of their names, as eight hexadecimal digits."""
    ordered = (tensor.reshape(-1) for _, tensor in sorted(named, key=lambda one: one[0]) if storable(tensor))
    return f"{fingerprint(tensor for tensor in ordered if tensor.numel()):08x}"
