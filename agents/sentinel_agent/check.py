"""One pass over a tensor: is anything in it nonfinite, and how large is the rest.

Owns the arithmetic of a check and nothing else: no I/O, no knowledge of rounds. ``aminmax`` propagates NaN and is exact in
every floating dtype it supports, at about the price of one read; counts are taken only when it finds something.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sentinel.wire.messages import Check
from sentinel_agent.contents import is_readable

_COMMON = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
EMPTY = Check(0, 0, 0, 0.0)
_INT_MAX = 2**31 - 1
_Getter = Callable[[str, str], str]
_precision: _Getter | None = getattr(torch._C, "_get_fp32_precision_getter", None) if torch._C.has_mkl else None
NORM_FROM = 16384
"""Elements from which the norm is cheaper than ``aminmax`` (below, a call's fixed price rules and the exact maximum is free)."""


def local_part(tensor: Any) -> torch.Tensor | None:
    """The plain floating tensor behind ``tensor`` that this rank holds; None if there is nothing to check.

    DTensors give their local shard, sparse tensors their values, complex ones their real view. Integers, empty, meta and other
    subclasses (FakeTensor while tracing) give None.
    """
    if type(tensor) is torch.Tensor and tensor.dtype in _COMMON and tensor.layout is torch.strided:
        if tensor.numel() and not tensor.requires_grad and not tensor.is_meta and not tensor.is_neg():
            return tensor if is_readable(tensor) else None
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        tensor = getattr(tensor, "_local_tensor", None)
        if type(tensor) is not torch.Tensor:
            return None
    if not is_readable(tensor):
        return None
    plain = _plain(tensor.detach().resolve_conj().resolve_neg())
    if plain is None or not plain.is_floating_point() or plain.numel() == 0 or plain.is_meta:
        return None
    return plain


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Values of a sparse tensor, real view of a complex one; None for layouts that have neither."""
    if tensor.is_sparse:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        return None
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def given_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """``local_part`` of a tensor that a collective is reading or writing, and so surely there: the common case at once."""
    common = type(tensor) is torch.Tensor and tensor.dtype in _COMMON and tensor.layout is torch.strided
    return tensor if common and tensor.numel() and not tensor.requires_grad else local_part(tensor)


class Checker:
    """Checks tensors and counts them. ``delay`` (seconds, before each check) exists for tests of the joins."""

    def __init__(self, *, delay: float = 0.0) -> None:
        self.count = 0
        self._delay = delay

    def check(self, tensors: Iterable[Any]) -> Check | None:
        """Merged finding over ``tensors``; None if none of them can be checked."""
        return self.check_parts([part for tensor in tensors if (part := local_part(tensor)) is not None])

    def check_parts(self, parts: list[torch.Tensor]) -> Check | None:
        """The same for tensors that are what ``local_part`` gives."""
        if self._delay:
            time.sleep(self._delay)
        found: Check | None = None
        for part in parts:
            one = check_one(part)
            found = one if found is None else merged(found, one)
        self.count += len(parts)
        return found

    def check_pieces(self, tensor: torch.Tensor, sizes: tuple[int, ...]) -> tuple[Check, list[float]] | None:
        """The same for one large float32 or bfloat16 tensor, with the L2 norm of each of its pieces, in one read.

        None if that cannot tell: something is nonfinite, or squares overflow or underflow.
        """
        if self._delay:
            time.sleep(self._delay)
        norms = norms_of(torch.split(tensor, list(sizes)))
        whole = math.hypot(*norms)
        if not 0.0 < whole < math.inf:
            return None
        self.count += 1
        return Check(tensor.numel(), 0, 0, whole), norms


def check_one(tensor: torch.Tensor) -> Check:
    """Check of one plain floating tensor (any shape, not empty).

    Large float32 and bfloat16 tensors are read once for their L2 norm, which is finite only if every element is, costs less than
    ``aminmax`` and bounds the largest magnitude; if it is not finite (or zero: squares underflow), ``aminmax`` decides. 8-bit
    floats are widened first, since no reduction takes them.
    """
    if tensor.element_size() < 2:
        tensor = tensor.to(torch.float32)
    if tensor.numel() > NORM_FROM and tensor.dtype in (torch.float32, torch.bfloat16):
        norm = large_norm(tensor)
        if 0.0 < norm < math.inf:
            return Check(tensor.numel(), 0, 0, norm)
    low, high = torch.aminmax(tensor)
    lowest, highest = low.item(), high.item()
    if math.isfinite(lowest) and math.isfinite(highest):
        return Check(tensor.numel(), 0, 0, max(abs(lowest), abs(highest)))
    return _counted(tensor)


def large_norm(tensor: torch.Tensor) -> float:
    """L2 norm of a large float32 or bfloat16 tensor, in float32, since ranks compare it; inf where squares overflow.

    From the product with itself where that is MKL's: it is bound by memory, the norm's own loop by arithmetic. A matmul precision
    below float32's sends even this product through oneDNN, ten times slower. Unlike the norm it uses as many threads as
    torch does: on a thread of gloo's it would start a team of them, so it is left to those that have one.
    """
    plain = tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.is_cpu and tensor.numel() <= _INT_MAX
    if plain and _precision is not None and _precision("mkldnn", "matmul") in ("none", "ieee") and _may_be_parallel():
        flat = tensor.view(-1)
        return math.sqrt(torch.dot(flat, flat).item())
    norm: float = torch.linalg.vector_norm(tensor, dtype=torch.float32).item()
    return norm


def _may_be_parallel() -> bool:
    return torch.get_num_threads() == 1 or threading.current_thread() is threading.main_thread()


def _norm(part: torch.Tensor) -> float:
    wide = torch.float32 if part.element_size() < 4 else part.dtype
    return float(torch.linalg.vector_norm(part, dtype=wide))


def l2_norm(parts: list[torch.Tensor], found: Check) -> float:
    """L2 norm of tensors that were checked as ``found``: already known for large ones, except in float16, where computing it
    is slow and their largest magnitude stands in."""
    if len(parts) == 1 and found.numel > NORM_FROM:
        return found.absmax
    small = all(part.numel() <= NORM_FROM for part in parts)
    return math.hypot(*(_norm(part) for part in parts)) if small else found.absmax


FEW = 4
"""Tensors up to which two calls for each cost less than the four for all of them."""


def norms_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """L2 norm of each of some tensors of one device, in float32; inf where squares overflow. Fetched at once from a device."""
    if len(tensors) <= FEW and tensors[0].device.type == "cpu":
        return [large_norm(tensor) for tensor in tensors]
    return torch.stack(torch._foreach_norm(list(tensors), dtype=torch.float32)).tolist()


def _counted(tensor: torch.Tensor) -> Check:
    finite = torch.isfinite(tensor)
    nan = int(torch.isnan(tensor).sum())
    inf = tensor.numel() - int(finite.sum()) - nan
    kept = torch.where(finite, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    low, high = torch.aminmax(kept)
    return Check(tensor.numel(), nan, inf, max(abs(low.item()), abs(high.item())))


def scalar_check(value: float) -> Check:
    """Check of a one-element tensor holding ``value``."""
    return Check(1, int(math.isnan(value)), int(math.isinf(value)), abs(value) if math.isfinite(value) else 0.0)


def merged(one: Check, other: Check) -> Check:
    """Both findings as one."""
    return Check(one.numel + other.numel, one.nan + other.nan, one.inf + other.inf, max(one.absmax, other.absmax))


def is_nonfinite(tensor: Any) -> bool:
    """True if the local part of ``tensor`` holds NaN or inf."""
    part = local_part(tensor)
    return part is not None and check_one(part).nonfinite
