"""What the training scripts here have in common: a process group, batches, a small network, a planted NaN, an ending.

Plain PyTorch: nothing here or in the scripts knows of Sentinel. A script holds several trainings, one for each function; the
arguments name those to run.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, CLASSES, ROWS = 16, 4, 8
torch.set_num_threads(1)


def begin() -> tuple[int, int]:
    """Make the gloo process group; (rank, world size)."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


def main(trainings: dict[str, Any]) -> None:
    """Run the trainings that the arguments name, one after another, from the script's globals."""
    begin()
    for name in sys.argv[1:]:
        torch.manual_seed(0)
        trainings[name]()
        gc.collect()  # a wrapped model is full of cycles, and the next training's parameters have the same names
    dist.destroy_process_group()


def rank() -> int:
    """This process's rank."""
    return int(os.environ["RANK"])


def world() -> int:
    """Number of ranks."""
    return int(os.environ["WORLD_SIZE"])


def batch(step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of this rank, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * step + rank())
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


def network(*extra: nn.Module) -> nn.Sequential:
    """A two-layer classifier, ``extra`` layers in its middle."""
    return nn.Sequential(nn.Linear(WIDTH, 32), *extra, nn.ReLU(), nn.Linear(32, CLASSES))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], step: int, rows: int = ROWS) -> torch.Tensor:
    """Cross entropy of ``model`` on this rank's batch."""
    inputs, labels = batch(step, rows)
    return nn.functional.cross_entropy(model(inputs).float(), labels)


def ddp(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    """``model`` (or the classifier) in DDP."""
    return DistributedDataParallel(network() if model is None else model, **options)


def sgd(parameters: Iterable[torch.Tensor], rate: float = 0.1) -> torch.optim.SGD:
    """Plain SGD."""
    return torch.optim.SGD(parameters, lr=rate)


def equal_start(model: nn.Module) -> nn.Module:
    """Rank 0's parameters on every rank, as a hand-written loop begins."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    return model


def average(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Mean over the ranks, in place."""
    dist.all_reduce(tensor, group=group)
    return tensor.div_(dist.get_world_size(group))


class _Planted(torch.autograd.Function):
    """Identity whose backward puts ``value`` into the first element of the gradient."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, value: float) -> torch.Tensor:
        context.value = value
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone()
        gradient.view(-1)[0] = context.value
        return gradient, None


def planted(tensor: torch.Tensor, here: bool, value: float = float("nan")) -> torch.Tensor:
    """``tensor``; if ``here``, its gradient gets one element of ``value``. The forward stays finite."""
    return _Planted.apply(tensor, value) if here else tensor


def say(word: str, what: object) -> None:
    """A line that the tests read."""
    sys.stdout.write(f"[rank {rank()}] {word} {what}\n")  # one write, so that ranks do not mix
    sys.stdout.flush()


def say_digest(name: str, tensors: Iterable[torch.Tensor], losses: Iterable[float]) -> None:
    """SHA-256 over the bits of all parameters and losses: equal only if the training was bit for bit the same."""
    digest = hashlib.sha256()
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        digest.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    digest.update(repr([loss.hex() for loss in losses]).encode())
    say(name, digest.hexdigest())
