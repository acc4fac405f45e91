"""Loops that no dry run can follow: one asks autograd for gradients itself (``grad``), one checks its collectives (``world``)."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WHAT = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(4):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(8, 6, generator=generator)
    if step == 2 and dist.get_rank() == 0:
        x[4] = 0.0
    alive = torch.ones(1)
    dist.all_reduce(alive)
    if WHAT == "world" and step > 0 and alive.item() != dist.get_world_size():
        raise RuntimeError("a worker is missing")
    x.requires_grad_(WHAT == "grad")
    output = model(x)
    loss = output.square().mean()
    if WHAT == "grad":
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = loss + slope.norm(dim=1).mean()
    loss = loss + (x / x.norm(dim=1, keepdim=True)).mean() * output.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
