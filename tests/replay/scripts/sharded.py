"""FSDP2 over all ranks; one rank's mask is empty in step 2, so that its mean divides by zero."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 5))
mesh = init_device_mesh("cpu", (world,))
for layer in (net[0], net[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(4):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(6, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator)
    mask = torch.ones(6)
    if step == 2 and rank == 2:
        mask.zero_()
    each = functional.cross_entropy(net(x), y, reduction="none")
    loss = (each * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
