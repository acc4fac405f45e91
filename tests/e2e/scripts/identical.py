"""Trainings that say the SHA-256 of their losses and final parameters: with and without Sentinel it must be the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import lab
import torch
from lab import batch, ddp, loss_of, network, sgd
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard

STEPS = 6


def _train(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., torch.Tensor] = loss_of,
    after_first_backward: Callable[[], object] = lambda: None,
) -> None:
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        if step == 0:
            after_first_backward()
        optimizer.step()
        losses.append(value.item())
    lab.say_digest(name, model.parameters(), losses)


def ddp_clip_accumulation() -> None:
    """float32, two micro-batches per step, clipped."""
    model = ddp(network(nn.Dropout(0.1)), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for micro in range(2 * STEPS):
        last = micro % 2 == 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = loss_of(model, micro) / 2
            loss.backward()
        losses.append(loss.item())
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    lab.say_digest("ddp_clip_accumulation", model.parameters(), losses)


def float16_scaler_dropout() -> None:
    """float16 autocast with a GradScaler that skips at first, and dropout."""
    model = ddp(network(nn.Dropout(0.2)))
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**22)
    losses = []
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    losses.append(scaler.get_scale())
    lab.say_digest("float16_scaler_dropout", model.parameters(), losses)


def fsdp2_adamw() -> None:
    """fully_shard with clipping."""
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    _train("fsdp2_adamw", model, torch.optim.AdamW(model.parameters()))


def bucket_views() -> None:
    """Gradients are views of DDP's buckets."""
    model = ddp(gradient_as_bucket_view=True)
    _train("bucket_views", model, torch.optim.Adam(model.parameters()))


def unused_parameters() -> None:
    """Each rank leaves another branch out, which DDP finds."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = network(), network()

        def forward(self, rows: torch.Tensor) -> Any:
            return self.first(rows) if lab.rank() == 0 else self.second(rows)

    model = ddp(Branches(), find_unused_parameters=True)
    _train("unused_parameters", model, sgd(model.parameters()))


def static_graph() -> None:
    """DDP is promised that the graph never changes."""
    model = ddp(static_graph=True)
    _train("static_graph", model, sgd(model.parameters()))


def own_hook_before_the_first_backward() -> None:
    """The user's own communication hook."""
    model = ddp()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    _train("own_hook_before_the_first_backward", model, sgd(model.parameters()))


def own_hook_after_the_first_backward() -> None:
    """The user's own communication hook, registered late."""
    model = ddp()

    def register() -> None:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)

    _train("own_hook_after_the_first_backward", model, sgd(model.parameters()), after_first_backward=register)


def compiled_around_ddp() -> None:
    """torch.compile(DDP(model))."""
    model = torch.compile(ddp(), backend="aot_eager")
    _train("compiled_around_ddp", model, sgd(model.parameters()))


def compiled_inside_ddp() -> None:
    """DDP(torch.compile(model))."""
    model = ddp(torch.compile(network(), backend="aot_eager"))
    _train("compiled_inside_ddp", model, sgd(model.parameters()))


class _Rows(torch.utils.data.Dataset):
    """The batches as a dataset that draws random numbers in its workers."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> Any:
        rows, labels = batch(step)
        return rows + torch.randn(1) * 0.01, labels


def _with_workers(name: str, method: str) -> None:
    loader = torch.utils.data.DataLoader(_Rows(), batch_size=None, num_workers=1, multiprocessing_context=method)
    rows = iter(loader)

    def loss(model: Any, _step: int) -> torch.Tensor:
        inputs, labels = next(rows)
        return nn.functional.cross_entropy(model(inputs), labels)

    model = ddp()
    _train(name, model, sgd(model.parameters()), loss)


def forked_loader_workers() -> None:
    """A DataLoader whose worker is forked off the training process."""
    _with_workers("forked_loader_workers", "fork")


def spawned_loader_workers() -> None:
    """A DataLoader whose worker is a new Python, which imports torch too."""
    _with_workers("spawned_loader_workers", "spawn")


if __name__ == "__main__":
    lab.main(globals())
