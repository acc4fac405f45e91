"""Trainings over a broken network: the backend returns something else than the reduction of what it was given.

The damage is done below every tap: the CPU kernels of c10d's reductions are replaced by ones that call gloo and then spoil the
result of step 3 on the ranks concerned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lab
import torch
import torch.distributed as dist
from lab import ddp, loss_of, network, sgd
from torch.distributed.fsdp import fully_shard

STEPS, FAULT = 6, 3
Damage = Callable[[list[torch.Tensor]], None]
now = {"step": -1}
library = torch.library.Library("c10d", "IMPL")
warnings.filterwarnings("ignore", "Warning only once for all operators")  # a kernel is replaced, on purpose


def _gloo(boxed: Any) -> Any:
    return dist.ProcessGroup.unbox(boxed)._get_backend(torch.device("cpu"))


def _break_all_reduce(before: Damage, after: Damage) -> None:
    def kernel(tensors: Any, group: Any, op: Any, _sparse: Any = None, _async: bool = True, _timeout: int = -1) -> Any:
        broken = now["step"] == FAULT
        now["step"] = -1 if broken else now["step"]  # the first reduction of that step
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op) if not isinstance(op, torch.ScriptObject) else dist.ReduceOp.SUM
        if broken:
            before(tensors)
        work = _gloo(group).allreduce(tensors, options)
        if broken:
            work.wait()
            after(tensors)
        return tensors, work.boxed()

    library.impl("allreduce_", kernel, "CPU")


def _break_reduce_scatter(after: Damage) -> None:
    def kernel(out: Any, into: Any, group: Any, op: Any, _async: bool = True, _timeout: int = -1) -> Any:
        broken = now["step"] == FAULT
        now["step"] = -1 if broken else now["step"]
        options = dist.ReduceScatterOptions()
        work = _gloo(group)._reduce_scatter_base(out, into, options)
        if broken:
            work.wait()
            after([out])
            work = _gloo(group).allreduce([torch.zeros(1)])  # gloo's own work copies the result out again at each wait
        return out, work.boxed()

    library.impl("_reduce_scatter_base_", kernel, "CPU")


def _nothing(_tensors: list[torch.Tensor]) -> None:
    pass


def _train(model: Any) -> None:
    optimizer = sgd(model.parameters(), 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        now["step"] = step
        loss.backward()
        optimizer.step()


def one_rank_receives_nan() -> None:
    """Finite inputs everywhere; rank 1's copy of the result holds one NaN."""

    def spoil(tensors: list[torch.Tensor]) -> None:
        if lab.rank() == 1:
            tensors[0].view(-1)[5] = float("nan")

    _break_all_reduce(_nothing, spoil)
    _train(ddp())


def one_rank_receives_another_sum() -> None:
    """One element of rank 1's copy of the result has a bit flipped: finite, but not what the others received."""

    def flip(tensors: list[torch.Tensor]) -> None:
        if lab.rank() == 1:
            tensors[0].view(-1).view(torch.int32)[5] ^= 1 << 20

    _break_all_reduce(_nothing, flip)
    _train(ddp())


def a_contribution_is_lost() -> None:
    """Every rank receives the same finite result, but rank 1's gradients are not in it."""

    def lose(tensors: list[torch.Tensor]) -> None:
        if lab.rank() == 1:
            tensors[0].zero_()

    _break_all_reduce(lose, _nothing)
    _train(ddp())


def a_shard_arrives_broken() -> None:
    """A reduce-scatter whose result only the owner of the shard can see is wrong on rank 1."""

    def spoil(tensors: list[torch.Tensor]) -> None:
        if lab.rank() == 1:
            tensors[0].view(-1)[0] = float("inf")

    _break_reduce_scatter(spoil)
    model = network()
    fully_shard(model)
    _train(model)


if __name__ == "__main__":
    lab.main(globals())
