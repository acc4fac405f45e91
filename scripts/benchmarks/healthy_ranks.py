"""The training processes of the healthy rounds: long, ordinary trainings in which nothing is wrong, one after another.

Owns the trainings, which are plain PyTorch. Started by ``healthy.py`` under ``sentinel run``; of Sentinel it asks nothing but the
number of the open round.

usage: healthy_ranks.py ROUNDS FOLDER TRAINING...      (each training has about ROUNDS rounds; writes FOLDER/rank-N.json)
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sentinel_agent import process

WIDTH, CLASSES, ROWS = 16, 4, 8
FEWER = 5  # batches that rank 0 lacks in each epoch with uneven inputs
EPOCH = 50


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of this rank."""
    choice = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(ROWS, WIDTH, generator=choice), torch.randint(0, CLASSES, (ROWS,), generator=choice)


def network(*extra: nn.Module) -> nn.Sequential:
    """A small classifier, ``extra`` layers in its middle."""
    return nn.Sequential(nn.Linear(WIDTH, 32), *extra, nn.ReLU(), nn.Linear(32, CLASSES))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], step: int) -> torch.Tensor:
    """Cross entropy on this rank's batch."""
    inputs, labels = batch(step)
    return nn.functional.cross_entropy(model(inputs).float(), labels)


def train(model: nn.Module, rounds: int, *, clip: float = 0.0, reduce: Callable[[], None] | None = None) -> None:
    """The ordinary loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(rounds):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if reduce is not None:
            reduce()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def ddp(rounds: int) -> None:
    """DDP."""
    train(DistributedDataParallel(network()), rounds)


def clipping(rounds: int) -> None:
    """DDP with clipping in every round."""
    train(DistributedDataParallel(network()), rounds, clip=0.1)


def accumulation(rounds: int) -> None:
    """Four micro-batches a step, each of them reduced."""
    _accumulate(rounds, no_sync=False)


def accumulation_no_sync(rounds: int) -> None:
    """Four micro-batches a step, the last one reduced."""
    _accumulate(rounds, no_sync=True)


def _accumulate(rounds: int, *, no_sync: bool) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(rounds):
        for micro in range(4):
            with model.no_sync() if no_sync and micro < 3 else contextlib.nullcontext():
                (loss_of(model, 4 * step + micro) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def bfloat16_autocast(rounds: int) -> None:
    """bfloat16 autocast."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(rounds):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()


def float16_scaler(rounds: int) -> None:
    """float16 autocast with a GradScaler that grows, overflows and skips all the time."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    for step in range(rounds):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def fsdp2(rounds: int) -> None:
    """fully_shard, layer by layer."""
    model = network()
    fully_shard(model[0])
    fully_shard(model)
    train(model, rounds, clip=1.0)


def hsdp(rounds: int) -> None:
    """Shards within pairs, replicas across them."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model, mesh=mesh)
    train(model, rounds)


def batch_norm(rounds: int) -> None:
    """BatchNorm, whose statistics DDP broadcasts."""
    train(DistributedDataParallel(network(nn.BatchNorm1d(32))), rounds)


def dropout(rounds: int) -> None:
    """Dropout, drawn differently on each rank."""
    torch.manual_seed(dist.get_rank())
    train(DistributedDataParallel(network(nn.Dropout(0.3))), rounds)


class Recomputing(nn.Module):
    """A network whose forward runs a second time inside backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(nn.Dropout(0.2))

    def forward(self, inputs: torch.Tensor) -> Any:
        """Class scores."""
        return checkpoint(self.inner, inputs, use_reentrant=False)


def gradient_checkpointing(rounds: int) -> None:
    """Activations are computed again in backward."""
    train(DistributedDataParallel(Recomputing()), rounds)


def compiled(rounds: int) -> None:
    """torch.compile around DDP."""
    train(torch.compile(DistributedDataParallel(network()), backend="aot_eager"), rounds)


def hand_loop(rounds: int) -> None:
    """all_reduce(p.grad) by hand."""
    model = network()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)

    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())  # type: ignore[union-attr]

    train(model, rounds, reduce=average)


def gan(rounds: int) -> None:
    """Two networks that step in turn: two rounds a step."""
    maker = DistributedDataParallel(nn.Linear(8, WIDTH))
    judge = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1)))
    make_step, judge_step = (torch.optim.Adam(one.parameters(), lr=1e-3) for one in (maker, judge))
    score = nn.functional.binary_cross_entropy_with_logits
    for step in range(-(-rounds // 2)):
        real, _ = batch(step)
        noise = torch.randn(ROWS, 8)
        judge_step.zero_grad()
        truth = torch.cat([torch.ones(ROWS, 1), torch.zeros(ROWS, 1)])
        score(judge(torch.cat([real, maker(noise).detach()])), truth).backward()
        judge_step.step()
        make_step.zero_grad()
        score(judge(maker(noise)), torch.ones(ROWS, 1)).backward()
        make_step.step()


def join(rounds: int) -> None:
    """Epochs in which rank 0 runs out of batches first. No Adam: its state would not be that of the others afterwards."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(-(-rounds // EPOCH)):
        with model.join():
            for step in range(min(EPOCH, rounds) - (FEWER if dist.get_rank() == 0 else 0)):
                optimizer.zero_grad()
                loss_of(model, EPOCH * epoch + step).backward()
                optimizer.step()


TRAININGS: dict[str, Callable[[int], None]] = {
    one.__name__: one
    for one in (
        ddp,
        clipping,
        accumulation,
        accumulation_no_sync,
        bfloat16_autocast,
        float16_scaler,
        fsdp2,
        hsdp,
        batch_norm,
        dropout,
        gradient_checkpointing,
        compiled,
        hand_loop,
        gan,
        join,
    )
}


def main() -> None:
    """Run the trainings that the arguments name."""
    rounds, folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    agent = process.current()
    assert agent is not None, "start me under sentinel run"
    done = []
    for name in names:
        torch.manual_seed(0)
        began, first = time.monotonic(), agent.ledger.round.number
        TRAININGS[name](int(rounds))
        gc.collect()
        last = agent.ledger.round.number - 1
        done.append({"training": name, "first": first, "last": last, "seconds": time.monotonic() - began})
    Path(folder, f"rank-{dist.get_rank()}.json").write_text(json.dumps(done))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
