"""Trains on a DataLoader whose data set holds constant samples; saves a checkpoint and a log line at every step.

usage: loader.py INDICES [workers]   where INDICES are the constant samples of step 3's batch on rank 1, such as 5 or 5,40
"""

import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, STEPS, BAD_STEP = 64, 5, 3


def main() -> None:
    """Train for a few steps."""
    planted = [int(one) for one in sys.argv[1].split(",")]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    logging.basicConfig(filename=f"train-{rank}.log", level=logging.INFO)
    signals = torch.randn(BATCH * STEPS * world, 16)
    targets = signals[:, :4].mean(1, keepdim=True)
    for index in planted:
        signals[(BAD_STEP * BATCH + index) * world + 1] = 0.5
    dataset = TensorDataset(signals, targets)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=int((sys.argv[2:] or ["0"])[0]))
    model = DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (signal, target) in enumerate(loader):
        normalised = (signal - signal.mean(1, keepdim=True)) / signal.std(1, keepdim=True)
        loss = functional.mse_loss(model(normalised), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logging.info("step %d loss %f", step, loss.item())
        Path("checkpoints").mkdir(exist_ok=True)
        torch.save(model.state_dict(), f"checkpoints/{rank}-{step}.pt")
        with Path(f"losses-{rank}.txt").open("a") as file:
            file.write(f"{loss.item()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
