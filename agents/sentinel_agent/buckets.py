"""The common case of a gradient reduction made cheap: a large bucket that DDP's reducer hands over straight from the engine.

Owns the quick look at it. Between two layers of a backward nothing of ours is in any cache, so there only what cannot wait is done:
one read of what goes on the wire. Booking it (whose group, whose gradients, which number in the round) is done for all buckets
together when backward ends. Whatever is not this common case, or is nonfinite, goes the long way at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from sentinel.wire.messages import Check
from sentinel_agent.check import NORM_FROM, large_norm
from sentinel_agent.rounds import Reduction
from sentinel_agent.taps.wire import Reader

_QUICK = frozenset({torch.float32, torch.bfloat16})


@dataclass(slots=True)
class Bucket:
    """A bucket on its way. ``found`` is what it held, ``sum_in`` the sum of it where its result will be audited."""

    read: Reader
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parts: list[torch.Tensor]
    found: Check
    turn: int = 0
    sum_in: float | None = None
    result: Any = None
    reduction: Reduction | None = None  # once it is booked
    work: Any = None  # so is the collective's Work
    returned: Check | None = None  # once its result was looked at


def quick_look(read: Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bucket | None:
    """The bucket, looked at, if it is one large plain tensor of finite elements; None where the long way must be gone."""
    given = args[0] if args and read.op == "allreduce_" else None
    if type(given) is not list or len(given) != 1:
        return None
    tensor = given[0]
    if type(tensor) is not torch.Tensor or tensor.dtype not in _QUICK or tensor.requires_grad or tensor.is_sparse:
        return None
    numel = tensor.numel()
    if numel <= NORM_FROM:
        return None
    norm = large_norm(tensor)
    if not 0.0 < norm < math.inf:
        return None
    return Bucket(read, args, kwargs, given, Check(numel, 0, 0, norm))
