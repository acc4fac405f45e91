"""What of a tensor can be read here and now: this rank's part, the pieces of a sparse one, and whether the storage is still there.

Owns nothing but these questions; capture, statistics and dump ask the same ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor; any other tensor as it is."""
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, Tensor) else tensor


def sparse_parts(tensor: Tensor) -> dict[str, Tensor]:
    """The strided tensors a sparse tensor is made of, by name; empty for a layout we cannot take apart."""
    if tensor.layout is torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {"crow_indices": tensor.crow_indices(), "col_indices": tensor.col_indices(), "values": tensor.values()}
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return {"ccol_indices": tensor.ccol_indices(), "row_indices": tensor.row_indices(), "values": tensor.values()}
    return {}


def is_readable(tensor: Tensor) -> bool:
    """True if every element lies inside memory that exists.

    Sharded training shrinks the storage of tensors that others still refer to. Reading such a tensor on the CPU is a crash of
    the process, or memory that was never ours, so everything that reads asks here first.
    """
    if tensor.is_meta:
        return False
    if tensor.layout is not torch.strided:
        parts = sparse_parts(tensor)
        return bool(parts) and all(is_readable(part) for part in parts.values())
    if tensor.numel() == 0:
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()
