"""Numbers about an op's inputs and outputs, and a quick look whether a tensor is finite.

Owns what counts as checkable. Runs inside a traced step, so a look is one read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from sentinel.bundle.replayed import OperandStatistics

MAX_OPERANDS: Final = 6


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors in an op's arguments or results, lists of them included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def plain(tensor: Tensor) -> Tensor | None:
    """What of ``tensor`` can be looked at for nonfinite values; None if there is nothing."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or tensor.numel() == 0:
        return None
    if tensor.layout is not torch.strided:
        return plain(tensor._values()) if tensor.layout is torch.sparse_coo else None
    if tensor.untyped_storage().nbytes() == 0:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.float() if tensor.element_size() == 1 else tensor


def is_finite(tensor: Tensor) -> bool:
    """True if nothing in ``tensor`` is NaN or infinite."""
    looked = plain(tensor)
    if looked is None:
        return True
    low, high = torch.aminmax(looked.detach())
    return math.isfinite(low.item()) and math.isfinite(high.item())


def has_nan(tensor: Tensor) -> bool:
    """True if anything in ``tensor`` is NaN."""
    looked = plain(tensor)
    return looked is not None and bool(torch.isnan(looked).any())


def bad_rows(tensor: Tensor) -> tuple[int, ...] | None:
    """Indices along dimension 0 with something nonfinite; None for a scalar."""
    looked = plain(tensor)
    if looked is None or looked.dim() == 0:
        return None
    hits = (~torch.isfinite(looked)).reshape(looked.shape[0], -1).any(dim=1)
    return tuple(hits.nonzero().flatten().tolist())


def describe(tensor: Tensor) -> OperandStatistics:
    """Statistics of one operand."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    looked = plain(tensor)
    if looked is None:
        return OperandStatistics(dtype=dtype, shape=tuple(tensor.shape))
    values = looked.detach().double()
    finite = values[torch.isfinite(values)]
    magnitudes = finite.abs()[finite != 0]
    return OperandStatistics(
        dtype=dtype,
        shape=tuple(tensor.shape),
        nan=int(torch.isnan(values).sum()),
        posinf=int((values == math.inf).sum()),
        neginf=int((values == -math.inf).sum()),
        zeros=int((values == 0).sum()),
        trained=tensor.requires_grad,
        minimum=float(finite.min()) if finite.numel() else None,
        maximum=float(finite.max()) if finite.numel() else None,
        absmin=float(magnitudes.min()) if magnitudes.numel() else None,
    )


def describe_all(tensors: Iterable[Tensor]) -> tuple[OperandStatistics, ...]:
    """Statistics of the first few operands."""
    return tuple(describe(tensor) for tensor, _ in zip(tensors, range(MAX_OPERANDS), strict=False))
