"""A loop that no dry run can follow: it asks autograd for gradients itself (``grad``), or raises on a loss it does not like (``wild``)."""

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
    x = torch.randn(8, 6, generator=generator, requires_grad=True)
    if step == 2 and dist.get_rank() == 0:
        x.data[4] = 0.0
    output = model(x)
    loss = output.square().mean()
    if WHAT == "grad":
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = loss + slope.norm(dim=1).mean()
    if WHAT == "wild" and step == 1 and not output.requires_grad:
        raise RuntimeError("where is my graph?")
    loss = loss + (x / x.norm(dim=1, keepdim=True)).mean() * output.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
