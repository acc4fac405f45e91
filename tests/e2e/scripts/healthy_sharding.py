"""Healthy trainings whose ranks share the work in other ways: shards, flat and coalesced loops, tensor and pipeline parallel."""

from __future__ import annotations

from typing import Any

import lab
import torch
import torch.distributed as dist
from lab import batch, ddp, equal_start, loss_of, network, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_to_all_single

STEPS = 6


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def fsdp1() -> None:
    """FullyShardedDataParallel, its flat parameter in one shard per rank."""
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    _train(model, sgd(model.parameters()))


def fsdp2_accumulating() -> None:
    """fully_shard with two micro-batches per step, the first without a reduction, and clipping."""
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            (loss_of(model, 2 * step + micro) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def hybrid_sharding() -> None:
    """Shards within pairs, replicas across them: four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model, mesh=mesh)
    _train(model, torch.optim.AdamW(model.parameters()))


def zero_redundancy_optimizer() -> None:
    """The optimizer's state is sharded; parameters are broadcast after each step."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp()
    _train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


def flattened_gradients() -> None:
    """All gradients in one buffer, reduced once, and copied back."""
    model = equal_start(network())
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        gradients = [p.grad for p in model.parameters()]
        flat = torch._utils._flatten_dense_tensors(gradients)
        lab.average(flat)
        for gradient, mean in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(mean)
        optimizer.step()


def coalesced_gradients() -> None:
    """All gradients in one coalesced all-reduce."""
    model = equal_start(network())
    optimizer = sgd(model.parameters())
    group = dist.group.WORLD
    options = dist.AllreduceCoalescedOptions()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        gradients = [p.grad for p in model.parameters()]
        group.allreduce_coalesced(gradients, options).wait()
        for gradient in gradients:
            gradient.div_(lab.world())
        optimizer.step()


def functional_collectives() -> None:
    """Gradients replaced by the results of functional all-reduces."""
    import torch.distributed._functional_collectives as functional

    model = equal_start(network())
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for parameter in model.parameters():
            summed = functional.all_reduce(parameter.grad, "sum", dist.group.WORLD)
            parameter.grad = functional.wait_tensor(summed) / lab.world()
        optimizer.step()


class _Summed(torch.autograd.Function):
    """Partial results of a row-split layer, summed over the ranks; their gradient is every rank's as it is."""

    @staticmethod
    def forward(context: Any, partial: torch.Tensor) -> torch.Tensor:
        total = partial.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def tensor_parallel() -> None:
    """A hidden layer split over the ranks by hand: activations are reduced in forward, gradients never."""
    torch.manual_seed(lab.rank())
    columns, rows = nn.Linear(lab.WIDTH, 16), nn.Linear(16, lab.CLASSES, bias=False)
    model = nn.Sequential(columns, nn.ReLU(), rows)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(lab.ROWS, lab.WIDTH, generator=generator)
        labels = torch.randint(0, lab.CLASSES, (lab.ROWS,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(_Summed.apply(model(inputs)), labels).backward()
        optimizer.step()


def pipeline() -> None:
    """Rank 0 sends activations to rank 1 and gets their gradient back; nothing is reduced."""
    _pipeline(nn.Linear(lab.WIDTH, lab.WIDTH) if lab.rank() == 0 else nn.Linear(lab.WIDTH, lab.CLASSES), STEPS)


def pipeline_of_equal_stages() -> None:
    """The same with stages that begin alike, as blocks of one seed do, and then go their own ways."""
    _pipeline(nn.Linear(lab.WIDTH, lab.WIDTH), 2 * STEPS)


def _pipeline(stage: nn.Module, steps: int) -> None:
    optimizer = sgd(stage.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        inputs, labels = batch(step)
        if lab.rank() == 0:
            hidden = stage(inputs)
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            received = torch.empty(lab.ROWS, lab.WIDTH)
            dist.recv(received, 0)
            received.requires_grad_()
            nn.functional.cross_entropy(stage(received), labels).backward()
            dist.send(received.grad, 0)
        optimizer.step()


def experts_of_equal_start() -> None:
    """Tokens go to every rank's own expert and back; experts begin alike, and nobody reduces their gradients."""
    model, expert = ddp(nn.Linear(lab.WIDTH, lab.WIDTH)), nn.Sequential(nn.Linear(lab.WIDTH, lab.WIDTH), nn.ReLU())
    optimizer = sgd([*model.parameters(), *expert.parameters()])
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        rows, labels = batch(step)
        tokens = model(rows)
        worked = expert(all_to_all_single(torch.empty_like(tokens), tokens))
        nn.functional.cross_entropy(all_to_all_single(torch.empty_like(worked), worked), labels).backward()
        optimizer.step()


def padding_of_nan_is_handed_round() -> None:
    """What is gathered, exchanged, broadcast and sent is padded with NaN, which nobody computes with."""
    model = ddp()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        padded = torch.full((8,), float("nan"))
        padded[:4] = float(step)
        dist.broadcast(padded, 0)
        optimizer.zero_grad()
        loss = loss_of(model, step)
        everyone = torch.empty(lab.world() * 8)
        dist.all_gather_into_tensor(everyone, padded)
        dist.all_to_all_single(torch.empty(8), padded)
        if lab.rank() == 0:
            dist.send(padded, 1)
        else:
            dist.recv(padded, 0)
        (loss + everyone.nansum() * 0.0).backward()
        optimizer.step()


if __name__ == "__main__":
    lab.main(globals())
