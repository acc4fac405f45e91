"""Comparing tensors bit by bit: the only equality that tells a fault of the hardware from rounding.

Owns the comparison; NaN payloads and signs of zeros count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(one: Tensor, other: Tensor) -> int:
    """Elements that differ in any bit; all of them if shape or dtype differ."""
    one, other = _words(one), _words(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return max(one.numel(), other.numel())
    return int((one != other).sum())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if both hold the same bits; a tensor in another floating dtype is compared in that dtype."""
    if one.dtype != other.dtype and one.is_floating_point() and other.is_floating_point():
        other = other.to(one.dtype)
    return one.shape == other.shape and differing(one, other) == 0


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names and bits."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(name.encode())
        total.update(_words(tensor).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _words(tensor: Tensor) -> Tensor:
    plain = getattr(tensor, "_local_tensor", tensor).detach().cpu().contiguous().reshape(-1)
    if plain.is_complex():
        plain = torch.view_as_real(plain).reshape(-1)
    return plain.view(_WORDS[plain.element_size()])
