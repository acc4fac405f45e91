"""Scene 2: gradients summed in float16, then divided. Every rank's own gradient is finite; the sum of them is not.

The batch is warmed up, as large runs do, and the loss is a sum over it: torchrun --nproc-per-node 2 overflow.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 7


def sum_then_divide(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that saves bandwidth: float16 on the wire, summed first, averaged afterwards."""
    half = bucket.buffer().to(torch.float16)
    summed = dist.all_reduce(half, async_op=True).get_future()
    return summed.then(lambda done: done.value()[0].to(torch.float32) / dist.get_world_size())


def main() -> None:
    """Fit the amount of ink on each digit by least squares."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pixels = torch.from_numpy(load_digits().data).float()[rank::world_size]
    ink = pixels.sum(dim=1, keepdim=True)
    model = DistributedDataParallel(nn.Linear(64, 1))
    model.register_comm_hook(None, sum_then_divide)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for step in range(STEPS):
        size = step + 1
        optimizer.zero_grad()
        loss = (model(pixels[:size]) - ink[:size]).square().sum()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step:2d}  batch {size:2d}  loss {loss.item():.4g}", flush=True)
    with torch.no_grad():
        error = (model.module(pixels) - ink).square().mean().sqrt()
    if rank == 0:
        print(f"error over all digits {error.item():.4g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
