"""240 steps, each clipped hard right after its backward: whoever still reads a gradient then reads another one."""

from __future__ import annotations

import lab
import torch.distributed as dist
from lab import ddp, loss_of, sgd
from torch import nn

lab.begin()
model = ddp(nn.Linear(lab.WIDTH, lab.CLASSES))
optimizer = sgd(model.parameters(), 10.0)
for step in range(240):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
dist.destroy_process_group()
