"""Tap on the wire: a Python kernel for c10d's reductions, and what else moves values, at dispatch key BackendSelect.

Owns the kernels and what they read off a call. They see every caller on every thread (DDP's C++ reducer, FSDP, hand-written loops,
functional and compiled collectives) and pass arguments through untouched, so results stay bit-identical. What a value means is
the ledger's business.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

OPS = {
    "allreduce_": ("tensors", "tensors"),
    "allreduce_coalesced_": ("tensors", "tensors"),
    "reduce_": ("tensors", "tensors"),
    "_reduce_scatter_base_": ("input_tensor", "output_tensor"),
    "reduce_scatter_": ("input_tensors", "output_tensors"),
    "reduce_scatter_tensor_coalesced_": ("inputs", "outputs"),
}
"""Op -> names of its input and output arguments in the c10d schema."""

MOVES = {
    "allgather_": "input_tensors",
    "allgather_coalesced_": "input_list",
    "_allgather_base_": "input_tensor",
    "allgather_into_tensor_coalesced_": "inputs",
    "alltoall_base_": "input",
    "alltoall_": "input_tensors",
    "broadcast_": "tensors",
    "scatter_": "input_tensors",
    "send": "tensors",
    "recv_": "tensors",
}
"""Not reductions, but nonfinite values travel through them. Op -> name of the argument that is given (``recv_``: received)."""

REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
"""c10d's RedOpType, in the order of its enum."""


@dataclass(slots=True)
class Call:
    """One call of a reduction as the kernel sees it."""

    op: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    group: Any
    boxed_reduce_op: Any
    waits: bool  # the caller asked for a synchronous collective

    @property
    def reduce_op(self) -> str:
        """Name of the reduction, read off the boxed op when somebody asks."""
        try:
            return REDUCE_OPS[self.boxed_reduce_op.op()]
        except (AttributeError, IndexError, RuntimeError, TypeError):
            return "UNKNOWN"


class Reader:
    """Picks the parts of a Call out of positional and keyword arguments of the c10d op ``op``, by the schema's names."""

    def __init__(self, op: str, order: list[str]) -> None:
        self.op = op
        moved = MOVES.get(op)
        self._inputs, self._outputs = (moved, moved) if moved else OPS[op]
        self._at = {argument: i for i, argument in enumerate(order)}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with these arguments."""
        given = _flat(self.pick(args, kwargs, self._inputs, ()))
        same = self._inputs == self._outputs
        return Call(
            op=self.op,
            inputs=given,
            outputs=given if same else _flat(self.pick(args, kwargs, self._outputs, ())),
            group=self.pick(args, kwargs, "process_group", None),
            boxed_reduce_op=self.pick(args, kwargs, "reduce_op", None),
            waits=not self.pick(args, kwargs, "async_op", True),
        )

    def pick(self, args: tuple[Any, ...], kwargs: dict[str, Any], argument: str, default: Any) -> Any:
        """The argument of this name, or ``default`` if it was left out."""
        i = self._at.get(argument, len(args))
        return args[i] if i < len(args) else kwargs.get(argument, default)


class Listener(Protocol):
    """What the tap calls. Neither may raise, so even reading the call is left to the listener's own guard."""

    def before(self, read: Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look at the inputs of the call that ``read(args, kwargs)`` gives. Returns a token, or None for no interest."""

    def after(self, token: Any, result: Any) -> None:
        """The collective was issued and its op returned ``result``; ``work_of(result)`` gives its c10d Work."""


_library: torch.library.Library | None = None
_listener: Listener | None = None
_busy = threading.local()


def install(listener: Listener) -> None:
    """Register the kernels (once per process) and send calls to ``listener``."""
    global _library, _listener
    _listener = listener
    if _library is None:
        _library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for op in (*OPS, *MOVES):
            if hasattr(torch.ops.c10d, op):
                _library.impl(op, _kernel(op), "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Collectives that this thread issues inside are our own, and not listened to."""
    before, _busy.inside = getattr(_busy, "inside", False), True
    try:
        yield
    finally:
        _busy.inside = before


def uninstall() -> None:
    """Stop listening. The kernels stay registered and pass calls through."""
    global _listener
    _listener = None


def reader(name: str) -> Reader:
    """How calls of the c10d op ``name`` are read."""
    overload = getattr(torch.ops.c10d, name).default
    return Reader(name, [argument.name for argument in overload._schema.arguments])


def _kernel(name: str) -> Callable[..., Any]:
    overload = getattr(torch.ops.c10d, name).default
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    read = reader(name)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _listener
        if listener is None or getattr(_busy, "inside", False):
            return overload.redispatch(keys - below, *args, **kwargs)
        _busy.inside = True
        try:
            token = listener.before(read, args, kwargs)
        finally:
            _busy.inside = False
        result = overload.redispatch(keys - below, *args, **kwargs)
        if token is not None:
            _busy.inside = True
            try:
                listener.after(token, result)
            finally:
                _busy.inside = False
        return result

    _not_compiled(kernel)
    return kernel


def _not_compiled(function: Callable[..., Any]) -> None:
    """Have torch.compile pass over ``function`` and what it calls: DDP broadcasts buffers in the midst of a compiled forward.

    The compiler itself is not imported for this, which would take seconds.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _flat(item)] if isinstance(value, (list, tuple)) else []


def work_of(result: Any) -> Any:
    """The Work in what a c10d op returned."""
    boxed = result[1] if isinstance(result, (tuple, list)) else result
    return dist.Work.unbox(boxed)


_groups: dict[str, tuple[str, tuple[int, ...]]] = {}


def forget_groups() -> None:
    """A new default process group was made: names may now mean other ranks."""
    _groups.clear()


def group_of(boxed: Any) -> tuple[str, tuple[int, ...]]:
    """Name and global ranks of a boxed process group; no ranks stand for the whole world."""
    group = dist.ProcessGroup.unbox(boxed)
    name = group.group_name
    if name not in _groups:
        ranks = tuple(dist.get_process_group_ranks(group))
        _groups[name] = (name, () if len(ranks) == dist.get_world_size() else ranks)
    return _groups[name]
