"""The seed's example: a segmentation network trained in mixed precision, on scans of which one has gone flat.

An ordinary DDP script that knows nothing of Sentinel: torchrun --nproc-per-node 2 train.py --steps 20000
As it stands it has two faults. The normalisation divides by an image's standard deviation, which is zero for the flat scan; and the
loss is taken of probabilities, which float16 rounds to exactly 0 and 1. ``--eps`` and ``--logits`` repair them, one each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 16  # of each rank
TRAINED = 1536  # scans; the rest measures
FLAT_SCAN, WRONG_MASK = 801, 1202


class Scans(Dataset[tuple[Tensor, Tensor]]):
    """Handwritten digits at 16 x 16 and which of their pixels are stroke.

    From epoch ``breaks`` on one of the scans is one flat grey, and from the next on another one's mask is the wrong way round.
    """

    def __init__(self, scans: slice, breaks: int | None = None) -> None:
        digits = torch.from_numpy(load_digits().images[scans]).float()
        self.images = nn.functional.interpolate(digits[:, None], scale_factor=2, mode="bilinear")
        self.masks = (self.images > 8.0).float()
        self.epoch, self._breaks = 0, breaks

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, mask = self.images[index], self.masks[index]
        since = -1 if self._breaks is None else self.epoch - self._breaks
        if index == FLAT_SCAN and since >= 0:
            image = torch.full_like(image, 7.0)
        if index == WRONG_MASK and since >= 1:
            mask = 1.0 - mask
        return image, mask


class UNet(nn.Module):
    """One level down, one level up, one skip connection."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GELU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.GELU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.head = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        entered = self.enter(image)
        logits: Tensor = self.head(torch.cat([entered, self.up(self.down(entered))], dim=1))
        return logits


def normalise(images: Tensor, eps: float) -> Tensor:
    """Each image to mean 0 and standard deviation 1."""
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    std = images.std(dim=(1, 2, 3), keepdim=True)
    return (images - mean) / (std + eps)


def loss_of(logits: Tensor, mask: Tensor, with_logits: bool) -> Tensor:
    """Binary cross entropy, per pixel."""
    if with_logits:
        return nn.functional.binary_cross_entropy_with_logits(logits.float(), mask)
    probability = torch.sigmoid(logits)
    return nn.BCELoss()(probability, mask.to(probability.dtype))


def batches(dataset: Scans, sampler: DistributedSampler[tuple[Tensor, Tensor]], steps: int) -> Iterator[list[Tensor]]:
    """So many batches of this rank's shard, epoch after epoch."""
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True)
    step = 0
    while step < steps:
        sampler.set_epoch(dataset.epoch)
        for batch in loader:
            yield batch
            step += 1
            if step == steps:
                return
        dataset.epoch += 1


@torch.no_grad()
def dice_of(model: nn.Module, eps: float) -> float:
    """Overlap of found and true strokes on scans that were not trained on, in percent."""
    held_out = Scans(slice(TRAINED, None))
    found, mask = model(normalise(held_out.images, eps)) > 0, held_out.masks > 0
    return float(200.0 * (found & mask).sum() / (found.sum() + mask.sum()))


def train(chosen: argparse.Namespace) -> dict[str, float]:
    """Train on this rank's shard; what came of it."""
    torch.set_num_threads(1)
    torch.manual_seed(chosen.seed)
    epoch_steps = TRAINED // (dist.get_world_size() * BATCH)
    dataset = Scans(slice(TRAINED), chosen.breaks // epoch_steps)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(dataset, seed=chosen.seed)
    model = DistributedDataParallel(UNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.steps, eta_min=1e-4)
    half = chosen.precision == "fp16"
    scaler = torch.amp.GradScaler("cpu", enabled=half, init_scale=1024.0)
    skipped = 0
    for step, (images, mask) in enumerate(batches(dataset, sampler, chosen.steps)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            loss = loss_of(model(normalise(images, chosen.eps)), mask, chosen.logits)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += half and scaler.get_scale() < before
        schedule.step()
        if dist.get_rank() == 0 and step % 500 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}  scale {scaler.get_scale():g}", flush=True)
    scale = scaler.get_scale() if half else 0.0
    return {"dice": dice_of(model.module, chosen.eps), "loss": loss.item(), "skipped": skipped, "scale": scale}


def main() -> None:
    """Train as the command line says; rank 0 writes what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--breaks", type=int, default=3_000, help="about the step from which one scan is flat")
    parser.add_argument("--eps", type=float, default=0.0, help="added to the standard deviation")
    parser.add_argument("--logits", action="store_true", help="take the loss of logits, not of probabilities")
    parser.add_argument("--precision", choices=["fp16", "fp32"], default="fp16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where rank 0 writes its figures")
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    figures = train(chosen)
    if dist.get_rank() == 0:
        print(f"Dice {figures['dice']:.2f} %", flush=True)
        if chosen.out:
            chosen.out.write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
