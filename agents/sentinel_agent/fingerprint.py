"""Fingerprints of tensors, and the sums that tell whether a reduction's result is the sum of its inputs.

Owns the arithmetic. Word sums are exact and order-free, so they are equal on all ranks whatever their thread counts; float sums
are not, and are only ever compared within a tolerance.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

SMALL = 16384
"""Elements up to which a tensor is fingerprinted and audited in every round; larger ones take turns."""
TURNS = 32

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Audit:
    """Sums of one collective's input and result (float64 values of sums in the tensor's own precision).

    ``absmax`` is the largest magnitude of the input; of several collectives, the mean of theirs over all elements, so that
    ``numel * absmax`` bounds the sum of all magnitudes as closely as can be.
    """

    index: int
    sum_in: float
    sum_out: float
    numel: int
    absmax: float
    op: str
    dtype: str

    def plus(self, later: Audit) -> Audit:
        """Both collectives as one: sums add up. Of another op or dtype the later one alone is kept."""
        if (self.op, self.dtype) != (later.op, later.dtype):
            return later
        numel = self.numel + later.numel
        return Audit(
            later.index,
            self.sum_in + later.sum_in,
            self.sum_out + later.sum_out,
            numel,
            (self.numel * self.absmax + later.numel * later.absmax) / numel,
            self.op,
            self.dtype,
        )


def its_turn(numel: int, index: int, round_: int) -> bool:
    """Is this collective's result fingerprinted in this round? One in thirty-two of the large ones is, in turn."""
    return numel <= SMALL or (index + round_) % TURNS == 0


def word_sum(tensor: torch.Tensor) -> int:
    """Sum of the tensor's 64-bit words modulo 2**64 (the last few elements in their own width): equal bits, equal sums."""
    flat = tensor.detach().reshape(-1)
    width = flat.element_size()
    whole = flat.numel() - flat.numel() % (8 // width)
    if flat.data_ptr() % 8 or whole == 0:
        return int(flat.view(_WORDS[width]).sum(dtype=torch.int64))
    total = int(flat[:whole].view(torch.int64).sum())
    if whole < flat.numel():
        total += int(flat[whole:].view(_WORDS[width]).sum(dtype=torch.int64))
    return total


def crc_of(value: int, start: int = 0) -> int:
    """CRC-32 of a 64-bit number, going on from ``start``."""
    return zlib.crc32((value & (2**64 - 1)).to_bytes(8, "little"), start)


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """One number for several tensors in order; bit-exact up to word order within a tensor."""
    value = 0
    for tensor in tensors:
        value = crc_of(word_sum(tensor), value)
    return value


def float_sum(tensors: Iterable[torch.Tensor]) -> float:
    """Sum of all elements: float32 and wider in their own precision, half precisions (always small here) in float32."""
    return sum(float(t.sum() if t.element_size() >= 4 else t.sum(dtype=torch.float32)) for t in tensors)
