"""Where this rank's part of a distributed tensor lies in the whole of it.

Owns the question to torch. A tensor that is whole on this rank has no answer.
"""

from __future__ import annotations

from torch import Tensor

from sentinel.bundle.manifest import Shard


def shard_of(tensor: Tensor) -> Shard | None:
    """Shape of the whole and the place of the local part, of a DTensor that is split in one piece per rank; None for any other."""
    placements, mesh = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None:
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = getattr(tensor, "_local_tensor", None)
    if local is None or tuple(local.shape) != tuple(shape):
        return None  # strided shards and partial sums: no one block of the whole
    return Shard(shape=tuple(tensor.shape), offset=tuple(offset))
