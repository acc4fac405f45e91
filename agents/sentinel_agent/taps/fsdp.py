"""Tap on FSDP2's ``foreach_reduce``: the unsharded gradients and their names, before the cast into the reduce buffer.

Owns the patch of a private function, guarded by a check of its signature: where that has changed, the wire tap alone remains.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sentinel.wire.messages import Check
from sentinel_agent.check import check_one, local_part
from sentinel_agent.errors import Health
from sentinel_agent.naming import user_name
from sentinel_agent.patching import wrap

_here = threading.local()


@dataclass(frozen=True, slots=True)
class Unsharded:
    """The gradients of one FSDP parameter group that are being reduced on this thread.

    ``raw`` holds one finding per gradient if the wire's dtype differs from theirs, else None (the wire shows them as they are).
    ``widths`` are the columns of each parameter in a row of the reduce buffer. The gradients themselves are not held: FSDP frees
    them as soon as they are copied into that buffer, and so they are read back from it.
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    raw: tuple[Check | None, ...] | None
    shapes: tuple[torch.Size, ...] = ()

    def nonfinite_columns(self, wire: torch.Tensor) -> Iterator[str]:
        """Names of the parameters whose columns of the flat reduce buffer hold something nonfinite."""
        width = sum(self.widths)
        if width == 0 or wire.numel() % width:
            return
        start, rows = 0, wire.view(-1, width)
        for name, columns in zip(self.names, self.widths, strict=True):
            if columns and check_one(rows[:, start : start + columns]).nonfinite:
                yield name
            start += columns

    def read_back(self, wire: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, gradient) from the flat reduce buffer, padding cut off; nothing where a cast has changed them."""
        width = sum(self.widths)
        if self.raw is not None or width == 0 or wire.numel() % width:
            return
        start, rows = 0, wire.view(-1, width)
        for name, columns, shape in zip(self.names, self.widths, self.shapes, strict=True):
            if columns and shape.numel():
                padded = rows[:, start : start + columns].reshape(-1, *shape[1:]) if shape else rows[:1, start]
                yield name, padded[: shape[0]] if shape else padded.reshape(())
            start += columns


def current() -> Unsharded | None:
    """The reduction that is running on this thread inside ``foreach_reduce``, if any."""
    return getattr(_here, "unsharded", None)


def install(module: Any, health: Callable[[], Health | None]) -> bool:
    """Patch ``foreach_reduce`` in the module that calls it. False if its signature is not the one that is known.

    ``health`` gives the agent's health at call time, None while there is no agent.
    """
    original = module.foreach_reduce
    if getattr(original, "_sentinel", False):
        return True
    names = list(inspect.signature(original).parameters)
    if names[:3] != ["fsdp_params", "unsharded_grads", "reduce_scatter_group"] or "reduce_dtype" not in names:
        print(
            "sentinel: FSDP2's foreach_reduce is not the one known; gradients are seen on the wire only",
            file=sys.stderr,
        )
        return False
    return wrap(module, "foreach_reduce", lambda known: _wrapped(known, names.index("reduce_dtype"), health))


def _wrapped(original: Callable[..., Any], dtype_at: int, health: Callable[[], Health | None]) -> Callable[..., Any]:
    def foreach_reduce(fsdp_params: Any, unsharded_grads: Any, *args: Any, **kwargs: Any) -> Any:
        watching = health()
        if watching is None or not watching.active:
            return original(fsdp_params, unsharded_grads, *args, **kwargs)
        at = dtype_at - 2
        reduce_dtype = args[at] if at < len(args) else kwargs.get("reduce_dtype")
        group = args[0] if args else kwargs.get("reduce_scatter_group")
        _here.unsharded = watching.guarded("fsdp", _look)(fsdp_params, unsharded_grads, group, reduce_dtype)
        try:
            return original(fsdp_params, unsharded_grads, *args, **kwargs)
        finally:
            _here.unsharded = None

    return foreach_reduce


def _look(params: Any, gradients: list[torch.Tensor], group: Any, reduce_dtype: torch.dtype | None) -> Unsharded:
    world = group.size() if group is not None else 1
    names = tuple(user_name(p._param_fqn or f"fsdp_param_{i}") for i, p in enumerate(params))
    widths = tuple(_width(gradient, world) for gradient in gradients)
    cast = reduce_dtype is not None and any(gradient.dtype != reduce_dtype for gradient in gradients)
    raw = tuple(_check(gradient) for gradient in gradients) if cast else None
    return Unsharded(names, widths, raw, tuple(gradient.shape for gradient in gradients))


def _check(gradient: torch.Tensor) -> Check | None:
    part = local_part(gradient)
    return check_one(part) if part is not None else None


def _width(gradient: torch.Tensor, world: int) -> int:
    """Columns of a parameter in the reduce buffer viewed as (world, -1): its dim 0 is padded to a multiple of ``world``."""
    if gradient.dim() == 0 or gradient.size(0) == 0:
        return 0 if gradient.dim() else 1
    return math.ceil(gradient.size(0) / world) * (gradient.numel() // gradient.size(0))
