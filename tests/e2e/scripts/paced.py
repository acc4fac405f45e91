"""A training of 40 steps that halts once at step 10 until the file ``go`` is there, and says how long its longest step was.

With the argument ``nan`` rank 1 meets NaN at step 30 and says when. All ranks say the digest of losses and parameters.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import lab
import torch.distributed as dist
from lab import ddp, loss_of, planted, sgd

STEPS, HALT, FAULT, GUILTY = 40, 10, 30, 1


def _halt() -> None:
    Path(f"at-{lab.rank()}").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    dist.barrier()


lab.begin()
model = ddp()
optimizer = sgd(model.parameters())
losses: list[float] = []
longest = 0.0
for step in range(STEPS):
    if step == HALT and "halt" in sys.argv:
        _halt()
    began = time.monotonic()
    optimizer.zero_grad()
    loss = loss_of(model, step)
    planted(loss, "nan" in sys.argv and step == FAULT and lab.rank() == GUILTY).backward()
    if step == FAULT:
        lab.say("at", time.time())
    optimizer.step()
    losses.append(loss.item())
    if step >= HALT:
        longest = max(longest, time.monotonic() - began)
lab.say("longest", longest)
lab.say_digest("digest", model.parameters(), losses)
dist.destroy_process_group()
