"""Distances between a batch's pairs under anomaly detection: a pair of equals has distance zero, and no derivative."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(4):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    one, other = torch.randn(2, 8, 6, generator=generator)
    if step == 2 and dist.get_rank() == 1:
        other[4] = one[4]
    optimizer.zero_grad()
    with torch.autograd.detect_anomaly(check_nan=True):
        first, second = model(torch.cat([one, other])).chunk(2)
        (first - second).square().sum(1).sqrt().mean().backward()
    optimizer.step()
dist.destroy_process_group()
