"""Six ranks; one row of rank 2 has nothing to normalise at step 2. Everybody's parameters are the same."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(4):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(8, 6, generator=generator)
    if step == 2 and dist.get_rank() == 2:
        x[4] = 0.0
    optimizer.zero_grad()
    model(x / x.norm(dim=1, keepdim=True)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
