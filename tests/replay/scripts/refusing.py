"""Probabilities of a normalised batch, and a loss that refuses them: one row had nothing to normalise, and it raises."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(4):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(8, 6, generator=generator)
    if step == 2 and dist.get_rank() == 1:
        x[4] = 3.0
    x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
    probability = torch.sigmoid(model(x))
    optimizer.zero_grad()
    torch.nn.functional.binary_cross_entropy(probability, torch.ones(8, 1)).backward()
    optimizer.step()
dist.destroy_process_group()
