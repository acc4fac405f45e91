"""The world a replay believes in: a process group of the recorded size that is one process, with nobody to wait for.

Owns the fake group and what collectives give: a reduction leaves this rank's own contribution, with those of other ranks added
where a replay of them has left theirs. Nothing leaves the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from sentinel_agent.patching import wrap
from sentinel_agent.taps.wire import OPS, Call, reader

Contributions = list[list[Tensor]]
"""Per reduction of the round, in order: what a rank gave to it."""


class World:
    """Stands in for the other ranks. ``on_reduction(call, index)`` hears of every reduction before it happens."""

    def __init__(self, rank: int, world_size: int, on_reduction: Callable[[Call, int], None]) -> None:
        self.peers: list[Contributions] = []
        self.index = 0
        self._rank = rank
        self._size = world_size
        self._on_reduction = on_reduction
        self._library: torch.library.Library | None = None
        self._kept: list[Any] = []  # futures and works that C++ refers to

    def install(self, made: Callable[[], None]) -> None:
        """Replace the making of process groups; ``made`` is called after the first."""
        wrap(distributed_c10d, "init_process_group", lambda original: self._init(original, made))
        wrap(distributed_c10d, "new_group", self._new_group)
        dist.init_process_group = distributed_c10d.init_process_group
        dist.new_group = distributed_c10d.new_group
        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for op in OPS:
            if hasattr(torch.ops.c10d, op):
                self._library.impl(op, self._kernel(op), "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]

    def restart(self) -> None:
        """The recorded round begins: count its reductions from zero."""
        self.index = 0

    def _init(self, original: Callable[..., Any], made: Callable[[], None]) -> Callable[..., Any]:
        def init_process_group(*_args: Any, **_kwargs: Any) -> None:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            store = FakeStore()
            original(backend="fake", rank=self._rank, world_size=self._size, store=store)
            made()

        return init_process_group

    def _new_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def new_group(ranks: Any = None, *_args: Any, **kwargs: Any) -> Any:
            kept = {key: kwargs[key] for key in ("use_local_synchronization", "group_desc") if key in kwargs}
            return original(ranks, backend="fake", **kept)

        return new_group

    def _kernel(self, name: str) -> Callable[..., Any]:
        overload = getattr(torch.ops.c10d, name).default
        below = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
        read = reader(name)

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            call = read(args, kwargs)
            self._on_reduction(call, self.index)
            if call.inputs is call.outputs:
                self._add_peers(call)
            self.index += 1
            if name == "allreduce_":
                return self._completed(args[0])
            return overload.redispatch(keys - below, *args, **kwargs)

        return kernel

    def _completed(self, tensors: list[Tensor]) -> Any:
        """A finished all-reduce: the fake group's own work has a future without tensors, which DDP's reducer refuses."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(list(tensors))
        work = torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
        self._kept.append((future, work))
        return tensors, work.boxed()

    def _add_peers(self, call: Call) -> None:
        """Add what other ranks' replays gave to this very reduction, in its own dtype, as the collective would."""
        for peer in self.peers:
            given = peer[self.index] if self.index < len(peer) else []
            if _fits(call.inputs, given):
                for mine, theirs in zip(call.inputs, given, strict=True):
                    _reduce(mine, theirs, call.reduce_op)
        if self.peers and call.reduce_op == "AVG":
            for mine in call.inputs:
                mine.div_(1 + len(self.peers))


def _fits(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(mine, theirs, strict=True)
    )


@torch.no_grad()
def _reduce(mine: Tensor, theirs: Tensor, op: str) -> None:
    if op == "MAX":
        mine.copy_(torch.maximum(mine, theirs))
    elif op == "MIN":
        mine.copy_(torch.minimum(mine, theirs))
    elif op == "PRODUCT":
        mine.mul_(theirs)
    else:
        mine.add_(theirs)
