"""Lets ranks agree on what each of them sees only a shard of: one MAX all-reduce after FSDP's own collectives.

Owns those all-reduces and the roll call before the first. A group gets one at the end of each backward that scattered gradients
over it: whoever reaches it has reached FSDP's own collective on the same group, so ranks cannot reach it unevenly. For that to hold
on a rank whose agent has switched itself off too, nothing here asks the agent's health, and only what cannot fail comes before it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sentinel_agent import roles
from sentinel_agent.taps import comm_hook, wire

KEY = "sentinel/guard"


def of_fsdp(who: roles.Caller) -> bool:
    """Is this the caller of FSDP's own gradient collectives?"""
    return who is roles.Caller.GRADIENT_HOOK and not comm_hook.running()


class Agreement:
    """The groups that this backward scattered gradients over, and how their ranks learn of each other's shards."""

    def __init__(self, rank: int, world_size: int, attempt: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._key = f"{KEY}/{attempt}"
        self._scattered: dict[str, int] = {}
        self._reduced: dict[str, int] = {}
        self._everyone: bool | None = None

    def announce(self) -> None:
        """Let the others know that this rank takes part; before its first collective."""
        c10d._get_default_store().set(f"{self._key}/{self._rank}", "here")

    def everyone(self) -> bool:
        """Has every rank announced itself? Asked after a collective of them all, so the answer is final and the same everywhere."""
        if self._everyone is None:
            store = own_client()
            self._everyone = store.check([f"{self._key}/{rank}" for rank in range(self._world_size)])
        return self._everyone

    def before(self, read: wire.Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A collective is about to be issued; those of FSDP's backward are remembered."""
        if read.op in wire.MOVES or not roles.in_backward() or not of_fsdp(roles.caller()):
            return
        call = read(args, kwargs)
        group, ranks = wire.group_of(call.group)
        kind = self._scattered if "reduce_scatter" in call.op else self._reduced
        kind[group] = len(ranks) or self._world_size

    @property
    def due(self) -> bool:
        """True if the backward that has ended scattered gradients."""
        return bool(self._scattered)

    def reach(self, nonfinite: bool) -> tuple[bool, bool]:
        """(did any rank see a nonfinite shard, do the groups cover the world) after a backward that scattered gradients.

        Groups take their turns in the order of their names, one order on all ranks. Raises RuntimeError if a collective fails.
        """
        groups, covered = sorted(self._scattered), self._cover_the_world()
        self._scattered, self._reduced = {}, {}
        if not self.everyone():
            return nonfinite, False
        for group in groups:
            nonfinite = _maximum(nonfinite, group)
        return nonfinite, covered

    def _cover_the_world(self) -> bool:
        size = 1
        for ranks in (*self._scattered.values(), *self._reduced.values()):
            size *= ranks
        return size == self._world_size


def own_client() -> Any:
    """A client of the job's store of our own: one that somebody waits with is blocked for all others."""
    store: Any = c10d._get_default_store()
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError, AttributeError):
        return store  # a store within this process has no clients


def _maximum(flag: bool, group: str) -> bool:
    """True on every rank of the group if ``flag`` is on any. Issued past our own tap."""
    process_group = vars(c10d)["_resolve_process_group"](group)
    device = "cpu" if "gloo" in dist.get_backend(process_group) else "cuda"
    shared = torch.tensor([float(flag)], device=device)
    with wire.unheard():
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=process_group)
    return bool(shared.item() > 0)
