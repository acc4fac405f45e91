"""A layer whose backward goes wrong once: a bit flipped by the machine (``flip``), or a rule of the code (``rule``).

With ``noise`` nothing goes wrong, but the layer's backward adds rounding noise that differs from run to run.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WHAT, BAD_STEP = sys.argv[1], 3
step_now = 0


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        made = gradient.t() @ x
        if WHAT == "noise":
            noise = torch.frombuffer(bytearray(os.urandom(4 * made.numel())), dtype=torch.int32).reshape(made.shape)
            made = made * (1 + 1e-6 * torch.sign(noise.float()))
        broken = step_now == BAD_STEP and dist.get_rank() == 1
        if broken and (WHAT == "rule" or (WHAT == "flip" and not Path("flipped").exists())):
            made[3, 5] = float("nan")
            if WHAT == "flip":
                Path("flipped").touch()
        if broken and WHAT == "noise" and not Path("flipped").exists():
            made[0, 0] = float("inf")
            Path("flipped").touch()
        return gradient @ weight, made


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 8) * 0.2)
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(Layer.apply(x, self.weight)))


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step_now in range(5):
    generator = torch.Generator().manual_seed(1000 * step_now + dist.get_rank())
    x, y = torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
