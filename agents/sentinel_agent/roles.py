"""Whose reduction is it? The role of a collective, from where it is called and what its tensors look like.

Owns the distinction of gradients from activations and scalars. Looks at call stacks and shapes, never at values.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from types import CodeType, FrameType

import torch

from sentinel.wire.messages import Role
from sentinel_agent.fingerprint import SMALL
from sentinel_agent.taps import comm_hook

MAX_FRAMES = 24
SMALL_TENSORS = 64  # a model of no more, with ``SMALL`` elements in all, is compared in every round


class Caller(Enum):
    """Who issued a collective, as the Python stack tells."""

    AUTOGRAD = auto()  # straight from the autograd engine: DDP's C++ reducer
    GRADIENT_HOOK = auto()  # a Python comm hook, FSDP's post-backward
    ACTIVATION = auto()  # SyncBatchNorm and other layers that reduce in their own backward
    LAYER = auto()  # torch's frame between the engine and an autograd.Function's backward
    USER = auto()


_BY_FILE = {
    "torch/autograd/graph.py": Caller.AUTOGRAD,
    "torch/autograd/function.py": Caller.LAYER,
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

_known: dict[int, tuple[CodeType, Caller | None]] = {}
"""By id of the code object, which the value keeps alive: hashing a code object itself walks all of its constants."""


def in_backward() -> bool:
    """True on a thread that is inside an autograd backward."""
    return torch._C._current_graph_task_id() != -1


def caller() -> Caller:
    """Who issued the collective whose kernel is running on this thread.

    In a backward, user code below the engine is a hook on a parameter, or a layer's own backward (torch's autograd.Function is
    between). A stack without any Python caller is a thread of the engine's own.
    """
    backward, users = in_backward(), False
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return Caller.USER if users else Caller.AUTOGRAD
        who = _of_code(frame.f_code)
        if who is Caller.USER:
            if not backward:
                return who
            users = True
        elif who is Caller.LAYER:
            return Caller.ACTIVATION if users else Caller.AUTOGRAD
        elif who is Caller.AUTOGRAD:
            return Caller.USER if users else who
        elif who is not None:
            return who
        frame = frame.f_back
    return Caller.USER


def from_autograd() -> bool:
    """True if nothing lies between the autograd engine and the collective whose kernel is running: ``caller`` in a hurry."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        known = _known.get(id(frame.f_code))
        if known is None:
            return False  # the long way learns it
        if known[1] is not None:
            return known[1] is Caller.AUTOGRAD
        frame = frame.f_back
    return True


def _of_code(code: CodeType) -> Caller | None:
    known = _known.get(id(code))
    if known is None:
        known = _known[id(code)] = (code, _of_file(code.co_filename))
    return known[1]


def _of_file(filename: str) -> Caller | None:
    name = filename.replace("\\", "/")
    for part, who in _BY_FILE.items():
        if part in name:
            return who
    return None if any(part in name for part in _PASSED_THROUGH) else Caller.USER


def role(tensors: list[torch.Tensor], who: Caller, *, backward: bool, after_backward: bool, layouts: Layouts) -> Role:
    """Role of a reduction over ``tensors`` (its inputs, floating, not empty).

    ``after_backward``: a backward of the open round has ended, and no forward or backward has begun since.
    """
    if comm_hook.running():
        return Role.GRADIENT
    if backward and who in (Caller.AUTOGRAD, Caller.GRADIENT_HOOK):
        return Role.GRADIENT
    if who is Caller.ACTIVATION:
        return Role.SCALAR if _are_scalars(tensors) else Role.ACTIVATION
    if not in_backward() and layouts.names_of(tensors) is not None:
        return Role.GRADIENT  # even with no backward before it: then it is a stale one
    if _are_scalars(tensors):
        return Role.SCALAR
    if who is Caller.GRADIENT_HOOK:
        return Role.GRADIENT
    if not backward and not after_backward:
        return Role.GRADIENT if layouts.holds_all(tensors) else Role.ACTIVATION
    return Role.GRADIENT if layouts.look_like_gradients(tensors) else Role.DERIVED


def _are_scalars(tensors: list[torch.Tensor]) -> bool:
    return all(t.numel() == 1 or t.dtype is torch.float64 for t in tensors)


class Layouts:
    """Shapes of the parameters, and the storages of their gradients as they stand after a backward."""

    def __init__(self) -> None:
        self.small = False  # so few and small parameters that looking at all of them costs nothing
        self._parameters: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._frozen: list[weakref.ref[torch.Tensor]] = []
        self._shapes: set[torch.Size] = set()
        self._totals: set[int] = set()
        self._owners: dict[int, tuple[str, weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] | None = None

    def learn(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take in the parameters that will get gradients."""
        named = list(named)
        trained = [(name, p) for name, p in named if p.requires_grad]
        self._frozen = [weakref.ref(p) for _, p in named if not p.requires_grad]
        self._parameters = [(name, weakref.ref(p)) for name, p in trained]
        self._shapes = {p.shape for _, p in trained}
        by_dtype: dict[torch.dtype, int] = {}
        for _, parameter in trained:
            by_dtype[parameter.dtype] = by_dtype.get(parameter.dtype, 0) + parameter.numel()
        self._totals = {*by_dtype.values(), sum(by_dtype.values())}
        self.small = (
            len(trained) <= SMALL_TENSORS
            and sum(by_dtype.values()) <= SMALL
            and all(p.device.type == "cpu" for _, p in trained)  # a device would be waited for, tensor by tensor
        )
        self._owners = None

    @property
    def known(self) -> bool:
        """True once any parameter was learnt."""
        return bool(self._parameters)

    def outdated(self) -> bool:
        """True if a parameter that was not trained is by now: somebody has unfrozen it."""
        return any(p.requires_grad for ref in self._frozen if (p := ref()) is not None)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, parameter) of those still alive."""
        return ((name, p) for name, ref in self._parameters if (p := ref()) is not None)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, gradient) of those that have one."""
        return ((name, p.grad) for name, p in self.parameters() if p.grad is not None)

    def forget_gradients(self) -> None:
        """Gradients have changed places: a backward ran, or they were cleared."""
        self._owners = None

    def names_of(self, tensors: list[torch.Tensor]) -> tuple[str, ...] | None:
        """Names of the parameters whose ``.grad`` these very tensors are; None if any of them is not one."""
        found = tuple(name for name, _ in self.owners_of(tensors))
        return found or None

    def owners_of(self, tensors: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """(name, parameter) whose ``.grad`` these very tensors are; empty if any of them is not one."""
        if self._owners is None:
            with_gradient = ((name, p, p.grad) for name, p in self.parameters() if p.grad is not None)
            self._owners = {
                storage_of(g): (name, weakref.ref(p), weakref.ref(g))
                for name, p, g in with_gradient
                if g.layout is torch.strided
            }
        found = [self._owner(storage_of(t)) for t in tensors if t.layout is torch.strided]
        known = [one for one in found if one is not None]
        return known if len(known) == len(found) else []

    def _owner(self, storage: int) -> tuple[str, torch.Tensor] | None:
        """Whose gradient lies there now; a cleared gradient's memory may hold anything since."""
        known = (self._owners or {}).get(storage)
        if known is None:
            return None
        name, parameter, gradient = known[0], known[1](), known[2]()
        there = gradient is not None and parameter is not None and storage_of(gradient) == storage
        return (name, parameter) if there and parameter is not None else None

    def names_behind(self, parameters: list[torch.Tensor]) -> tuple[str, ...] | None:
        """Names of these very parameters; None if any of them is not known."""
        known = {id(p): name for name, p in self.parameters()}
        found = tuple(known.get(id(p), "") for p in parameters)
        return found if found and all(found) else None

    def look_like_gradients(self, tensors: list[torch.Tensor]) -> bool:
        """True if shapes match parameters one by one, or one flat tensor holds all of them."""
        return all(t.shape in self._shapes for t in tensors) or self.holds_all(tensors)

    def holds_all(self, tensors: list[torch.Tensor]) -> bool:
        """True if this is one flat tensor as large as all gradients together."""
        return len(tensors) == 1 and tensors[0].dim() == 1 and tensors[0].numel() in self._totals

    def has_shape(self, tensor: torch.Tensor) -> bool:
        """True if some parameter has this shape."""
        return tensor.shape in self._shapes


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the storage behind ``tensor`` (of its local shard, for a DTensor)."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local.is_sparse:
        local = local._values()
    return local.untyped_storage().data_ptr()
