"""Scene 1: one flat image in rank 1's shard, and a normalisation that divides by its standard deviation.

An ordinary mixed-precision DDP script; it knows nothing of Sentinel: torchrun --nproc-per-node 2 segmentation.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from digits import SmallUNet, StrokeMasks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

BATCH = 16
STEPS = 12
# The sampler deals scan i to rank i % 2, so this one is sample 5 of rank 1's batch in step 7.
BROKEN_SCAN = (7 * BATCH + 5) * 2 + 1


def normalise(images: torch.Tensor, eps: float) -> torch.Tensor:
    """Each image to mean 0 and standard deviation 1."""
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    std = images.std(dim=(1, 2, 3), keepdim=True)
    return (images - mean) / (std + eps)


@torch.no_grad()
def report_dice(model: torch.nn.Module, dataset: StrokeMasks, broken: int | None, eps: float) -> None:
    """How well the masks overlap in the end, over all scans but the broken one."""
    good = [index for index in range(len(dataset)) if index != broken]
    found = model(normalise(dataset.images[good], eps)) > 0
    mask = dataset.masks[good]
    dice = 2 * (found & mask).sum() / (found.sum() + mask.sum())
    if dist.get_rank() == 0:
        print(f"Dice {dice.item():.2f}", flush=True)


def train(broken: int | None, eps: float, init_scale: float) -> None:
    """One pass over the digits on this rank's shard."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    dataset = StrokeMasks(2 * BATCH * STEPS, broken)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, shuffle=False))
    model = DistributedDataParallel(SmallUNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(normalise(batch["image"], eps))
        loss = functional.binary_cross_entropy_with_logits(logits.float(), batch["mask"].float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if dist.get_rank() == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}  scale {scaler.get_scale():g}", flush=True)
    report_dice(model.module, dataset, broken, eps)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(broken=BROKEN_SCAN, eps=0.0, init_scale=1024.0)
