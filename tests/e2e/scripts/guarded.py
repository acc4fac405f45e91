"""Trainings whose gradients are NaN at step 7 of rank 2, or from there on; ``LEFT_OUT=1`` leaves that step's call out.

Each says the SHA-256 of its parameters before step 7, and that of parameters, buffers and optimizer state in the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import lab
import torch
from lab import average, ddp, equal_start, loss_of, network, planted, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, FAULT, GUILTY = 12, 7, 2
LEFT_OUT = os.environ.get("LEFT_OUT") == "1"


class Planted(nn.Module):
    """Identity whose gradient gets a NaN on the guilty rank while ``armed``."""

    armed = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as they are."""
        return planted(rows, self.armed and lab.rank() == GUILTY)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach().contiguous()


def _digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 of tensors in the order of their names, which wrappers prefix."""
    digest = hashlib.sha256()
    for _, tensor in sorted((name.removeprefix("module."), tensor) for name, tensor in named):
        digest.update(_local(tensor).view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    kept = [(name, tensor) for name, tensor in model.state_dict().items()]
    for number, state in optimizer.state_dict()["state"].items():
        kept += [(f"{number}.{k}", v) for k, v in state.items() if isinstance(v, torch.Tensor)]
    return kept


def _train(
    name: str,
    model: nn.Module,
    fault: Planted,
    optimizer: torch.optim.Optimizer,
    reduce: Callable[[nn.Module], None] = lambda _model: None,
    clip: bool = False,
    micro_batches: int = 1,
    zero: Callable[[torch.optim.Optimizer], None] = torch.optim.Optimizer.zero_grad,
) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    average_of_weights = {n: _local(p).clone() for n, p in model.named_parameters()}
    for step in range(STEPS):
        zero(optimizer)
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            fault.armed = step == FAULT and micro == 0
            with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                loss_of(model, step * micro_batches + micro).backward()
        reduce(model)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step == FAULT:
            lab.say(f"before_{name}", _digest(model.named_parameters()))
        if not (LEFT_OUT and step == FAULT):
            optimizer.step()
        for n, p in model.named_parameters():
            average_of_weights[n].lerp_(_local(p), 0.1)
        schedule.step()
    lab.say(name, _digest([*_state(model, optimizer), *((f"average.{n}", t) for n, t in average_of_weights.items())]))


def ddp_adamw() -> None:
    """DDP with BatchNorm, clipped; AdamW decays weights, so a step of zeros would be seen."""
    fault = Planted()
    model = ddp(network(nn.BatchNorm1d(32), fault))
    _train("ddp_adamw", model, fault, torch.optim.AdamW(model.parameters(), fused=True), clip=True)


def ddp_momentum() -> None:
    """DDP, two micro-batches, momentum, foreach; gradients are zeroed in place."""
    fault = Planted()
    model = ddp(network(fault))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    _train("ddp_momentum", model, fault, optimizer, micro_batches=2, zero=lambda o: o.zero_grad(set_to_none=False))


def fsdp2() -> None:
    """FSDP2, only one rank's shard can hold the NaN."""
    fault = Planted()
    model = fully_shard(network(fault))
    _train("fsdp2", model, fault, torch.optim.AdamW(model.parameters()))


def hybrid_sharding() -> None:
    """FSDP2 over a 2 x 2 mesh."""
    fault = Planted()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(network(fault), mesh=mesh)
    _train("hybrid_sharding", model, fault, torch.optim.AdamW(model.parameters()))


def loop() -> None:
    """A hand-written loop that averages gradients itself."""
    fault = Planted()
    model = equal_start(network(fault))

    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            average(parameter.grad)

    _train("loop", model, fault, torch.optim.AdamW(model.parameters()), reduce=reduce)


def two_optimizers() -> None:
    """One backward, two optimizers that own a part of the parameters each; the NaN is in the first one's alone."""
    fault = Planted()
    model = ddp(nn.Sequential(nn.Linear(lab.WIDTH, 32), fault, nn.ReLU(), nn.Linear(32, lab.CLASSES)), bucket_cap_mb=1)
    first, second = (torch.optim.AdamW(layer.parameters()) for layer in (model.module[0], model.module[3]))
    for step in range(STEPS):
        fault.armed = step == FAULT
        for optimizer in (first, second):
            optimizer.zero_grad()
        loss_of(model, step).backward()
        if not (LEFT_OUT and step == FAULT):
            first.step()
            second.step()
    lab.say("two_optimizers", _digest([*_state(model, first), *((f"s.{n}", t) for n, t in _state(model, second))]))


def poisoned_buffers() -> None:
    """A NaN sample goes through BatchNorm on one rank, and its buffers are its own: they are finite again in the end."""
    model = ddp(network(nn.BatchNorm1d(32)), broadcast_buffers=False)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        inputs, labels = lab.batch(step)
        if step == FAULT and lab.rank() == GUILTY:
            inputs[3] = float("nan")
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    finite: Any = all(tensor.isfinite().all() for tensor in model.state_dict().values())
    lab.say("poisoned_buffers", bool(finite))


def always() -> None:
    """Gradients are NaN from step 7 on."""
    fault = Planted()
    model = ddp(network(fault))
    optimizer = sgd(model.parameters())
    for step in range(40):
        fault.armed = step >= FAULT
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    lab.say("always", "ended")


def split_by_hand() -> None:
    """Two groups of two average their own gradients: no rank knows all results, so the step is made as the script says."""
    groups = [dist_group(ranks) for ranks in ((0, 1), (2, 3))]
    fault = Planted()
    model = equal_start(network(fault))
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        fault.armed = step == FAULT
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for parameter in model.parameters():
            average(parameter.grad, groups[lab.rank() // 2])
        optimizer.step()
    lab.say("split_by_hand", bool(all(p.isfinite().all() for p in model.parameters())))


def one_agent_is_off() -> None:
    """Healthy FSDP2, in which every look of rank 1's agent fails, until it switches itself off."""
    model = fully_shard(network())
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    lab.say("one_agent_is_off", "ended")


def dist_group(ranks: tuple[int, ...]) -> Any:
    """A process group of these ranks; every rank has to make it."""
    return torch.distributed.new_group(list(ranks))


if __name__ == "__main__":
    if "one_agent_is_off" in sys.argv and lab.rank() == 1:
        options = json.loads(os.environ.get("SENTINEL_AGENT_OPTIONS", "{}"))
        os.environ["SENTINEL_AGENT_OPTIONS"] = json.dumps({**options, "fail_at": "wire"})
    lab.main({name: value for name, value in globals().items() if name != "dist_group"})
