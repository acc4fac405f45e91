"""A script that makes its ranks itself: torch.multiprocessing.spawn in one launched process."""

from __future__ import annotations

import os

import lab
import torch
import torch.distributed as dist
import torch.multiprocessing


def train(rank: int) -> None:
    """One spawned rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = lab.ddp()
    optimizer = lab.sgd(model.parameters())
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = lab.loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    lab.say_digest("spawned", model.parameters(), losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
