"""Healthy trainings in half precision, with scalers, masks, and layers that hold state or recompute."""

from __future__ import annotations

from typing import Any

import lab
import torch
import torch.distributed as dist
from lab import average, batch, ddp, loss_of, network, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 6


def _scaled(model: nn.Module, scaler: torch.amp.GradScaler, steps: int) -> None:
    optimizer = sgd(model.parameters(), 0.01)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def scaler_that_settles() -> None:
    """From 2**24 the first scales overflow float16; the scaler halves until they fit."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    _scaled(ddp(), scaler, 14)
    lab.say("scale", scaler.get_scale())


def scaler_that_grows() -> None:
    """A scale that doubles every second step overflows again and again, each time once."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    _scaled(ddp(), scaler, 20)
    lab.say("scale", scaler.get_scale())


def bfloat16_autocast() -> None:
    """bfloat16 autocast, which needs no scaler."""
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()


def bfloat16_parameters() -> None:
    """Parameters, gradients and reductions in bfloat16."""
    model = ddp(network().bfloat16())
    optimizer = sgd(model.parameters(), 0.01)
    for step in range(STEPS):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.bfloat16()).float(), labels).backward()
        optimizer.step()


def bfloat16_large_buckets() -> None:
    """Buckets so large that ranks compare their norms, which rank 0 reads layer by layer and the others as a whole."""
    torch.manual_seed(0)
    model = ddp(nn.Sequential(nn.Linear(lab.WIDTH, 300), nn.Linear(300, 300), nn.Linear(300, lab.CLASSES)).bfloat16())
    optimizer = sgd(model.parameters(), 1e-3)
    for step in range(12):
        optimizer.zero_grad()
        rows, labels = lab.batch(step)
        nn.functional.cross_entropy(model(rows.bfloat16()).float(), labels).backward()
        optimizer.step()


def gradient_checkpointing() -> None:
    """The forward of the middle runs a second time inside backward."""

    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(nn.Dropout(0.2))

        def forward(self, inputs: torch.Tensor) -> Any:
            return checkpoint(self.inner, inputs, use_reentrant=False)

    model = ddp(Recomputing())
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def batch_norm_and_dropout() -> None:
    """Running statistics differ per rank until DDP broadcasts them; dropout draws differently on each rank."""
    torch.manual_seed(lab.rank())
    model = ddp(network(nn.BatchNorm1d(32), nn.Dropout(0.3)))
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


class _SynchronisedMean(torch.autograd.Function):
    """Statistics over all ranks' batches, summed in forward and in backward, as a SyncBatchNorm does (torch's needs a GPU)."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor) -> torch.Tensor:
        return average(rows.mean(0))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return average(gradient.clone()).expand(lab.ROWS, -1) / lab.ROWS


def synchronised_norm() -> None:
    """A layer that reduces activations over the ranks, in forward and in its own backward."""

    class Centred(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows - _SynchronisedMean.apply(rows)

    model = ddp(network(Centred()))
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def masks_of_infinity() -> None:
    """Attention masked with -inf, a buffer of -inf, and a maximum that starts at -inf."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(4, 12)
            self.out = nn.Linear(4, lab.CLASSES)
            self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
            self.register_buffer("largest", torch.tensor(float("-inf")))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            query, key, value = self.project(inputs.view(-1, 4, 4)).chunk(3, -1)
            self.largest = torch.maximum(self.largest, inputs.detach().max())
            weights = (query @ key.transpose(1, 2) + self.mask).softmax(-1)
            return self.out((weights @ value).mean(1))

    model = ddp(Attention(), broadcast_buffers=False)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def compressed_by_a_hook() -> None:
    """float16 compression of ordinary gradients by torch's own hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = ddp()
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def zero_gradients_for_a_while() -> None:
    """A loss of zero weight gives exact zeros for some rounds in the middle of training."""
    model = ddp()
    optimizer = sgd(model.parameters())
    for step in range(12):
        optimizer.zero_grad()
        (loss_of(model, step) * float(not 4 <= step < 9)).backward()
        optimizer.step()
    dist.barrier()


if __name__ == "__main__":
    lab.main(globals())
