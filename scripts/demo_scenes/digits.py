"""The demo's task: scikit-learn's handwritten digits, and which of their pixels are stroke. Plain PyTorch, no Sentinel.

Owns the data set and the network that ``segmentation.py`` and ``healthy.py`` train.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset


class StrokeMasks(Dataset[dict[str, Tensor]]):
    """Digits at 16 x 16 with a mask of their strokes. The scan ``broken`` comes as a dead scanner leaves it: one flat grey."""

    def __init__(self, size: int, broken: int | None = None) -> None:
        scans = torch.from_numpy(load_digits().images[:size]).float()
        self.images = nn.functional.interpolate(scans[:, None], scale_factor=2, mode="bilinear")
        self.masks = self.images > 8.0
        if broken is not None:
            self.images[broken] = 7.0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "mask": self.masks[index]}


class SmallUNet(nn.Module):
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
