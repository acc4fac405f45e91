"""A script that makes its ranks itself: torch.multiprocessing.spawn in one launched process."""

from __future__ import annotations

import os
import socket

import lab
import torch.distributed as dist
import torch.multiprocessing


def train(rank: int, port: int) -> None:
    """One spawned rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    lab.torch.manual_seed(0)
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    torch.multiprocessing.spawn(train, args=(free,), nprocs=2)
