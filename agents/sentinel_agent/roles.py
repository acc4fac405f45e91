"""Whose reduction is it? The role of a collective, from where it is called and what its tensors look like.

Owns the distinction of gradients from activations and scalars. Looks at call stacks and shapes, never at values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import Enum, auto
from types import CodeType

import torch

from sentinel.wire.messages import Role

MAX_FRAMES = 24


class Caller(Enum):
    """Who issued a collective, as the Python stack tells."""

    AUTOGRAD = auto()  # straight from the autograd engine: DDP's C++ reducer
    GRADIENT_HOOK = auto()  # a Python comm hook, FSDP's post-backward
    ACTIVATION = auto()  # SyncBatchNorm and other layers that reduce in their own backward
    USER = auto()


_BY_FILE = {
    "torch/autograd/graph.py": Caller.AUTOGRAD,
    "torch/distributed/algorithms/ddp_comm_hooks/": Caller.GRADIENT_HOOK,
    "torch/distributed/algorithms/_comm_hooks/": Caller.GRADIENT_HOOK,
    "torch/distributed/fsdp/": Caller.GRADIENT_HOOK,
    "torch/nn/modules/_functions.py": Caller.ACTIVATION,
    "torch/distributed/tensor/": Caller.ACTIVATION,
}
_PASSED_THROUGH = (
    "/sentinel_agent/",
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/_functional_collectives",
    "torch/_ops.py",
    "torch/_library/",
    "torch/utils/_contextlib.py",
    "torch/_compile.py",
    "torch/_dynamo/",
    "<frozen",
    "contextlib.py",
    "functools.py",
)
"""Frames between a caller and the kernel that say nothing about the caller."""

_known: dict[CodeType, Caller | None] = {}


def in_backward() -> bool:
    """True on a thread that is inside an autograd backward."""
    return torch._C._current_graph_task_id() != -1


def caller() -> Caller:
    """Who issued the collective whose kernel is running on this thread."""
    frame = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        code = frame.f_code
        if code not in _known:
            _known[code] = _of_file(code.co_filename)
        found = _known[code]
        if found is not None:
            return found
        if frame.f_back is None:
            return Caller.USER
        frame = frame.f_back
    return Caller.USER


def _of_file(filename: str) -> Caller | None:
    name = filename.replace("\\", "/")
    for part, who in _BY_FILE.items():
        if part in name:
            return who
    return None if any(part in name for part in _PASSED_THROUGH) else Caller.USER


def role(tensors: list[torch.Tensor], who: Caller, *, backward: bool, after_backward: bool, layouts: Layouts) -> Role:
    """Role of a reduction over ``tensors`` (its inputs, floating, not empty)."""
    if backward and who in (Caller.AUTOGRAD, Caller.GRADIENT_HOOK):
        return Role.GRADIENT
    if who is Caller.ACTIVATION:
        return Role.SCALAR if _are_scalars(tensors) else Role.ACTIVATION
    if layouts.are_gradients(tensors):
        return Role.GRADIENT
    if _are_scalars(tensors):
        return Role.SCALAR
    if not backward and not after_backward:
        return Role.ACTIVATION
    return Role.GRADIENT if layouts.look_like_gradients(tensors) else Role.DERIVED


def _are_scalars(tensors: list[torch.Tensor]) -> bool:
    return all(t.numel() == 1 or t.dtype is torch.float64 for t in tensors)


class Layouts:
    """Shapes and storages of the gradients that are waiting to be reduced."""

    def __init__(self) -> None:
        self._shapes: set[torch.Size] = set()
        self._totals: set[int] = set()
        self._parameters: list[torch.Tensor] = []

    def learn(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take in the parameters that will get gradients."""
        self._parameters = [p for p in parameters if p.requires_grad]
        self._shapes = {p.shape for p in self._parameters}
        by_dtype: dict[torch.dtype, int] = {}
        for parameter in self._parameters:
            by_dtype[parameter.dtype] = by_dtype.get(parameter.dtype, 0) + parameter.numel()
        self._totals = {*by_dtype.values(), sum(by_dtype.values())}

    @property
    def known(self) -> bool:
        """True once any parameter was learnt."""
        return bool(self._parameters)

    def are_gradients(self, tensors: list[torch.Tensor]) -> bool:
        """True if a tensor shares its storage with some parameter's ``.grad``."""
        storages = {t.untyped_storage().data_ptr() for t in tensors if not t.is_sparse}
        return any(
            p.grad is not None and not p.grad.is_sparse and storage_of(p.grad) in storages for p in self._parameters
        )

    def look_like_gradients(self, tensors: list[torch.Tensor]) -> bool:
        """True if shapes match parameters one by one, or one flat tensor holds all of them."""
        if all(t.shape in self._shapes for t in tensors):
            return True
        return len(tensors) == 1 and tensors[0].dim() == 1 and tensors[0].numel() in self._totals


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the storage behind ``tensor`` (of its local shard, for a DTensor)."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage().data_ptr()
