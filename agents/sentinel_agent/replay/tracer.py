"""Follows every op of one step and remembers where nonfinite values came in.

Owns what an op's result is blamed on. Blame follows what was computed from what: a mask's -inf that a softmax absorbs, or a dead
branch, taints nothing that reaches the loss. Which tensors are asked about is ``sinks.py``'s business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sentinel.bundle.replayed import BadOp, OperandStatistics
from sentinel_agent.replay.operands import bad_rows, describe, describe_all, has_nan, is_finite, tensors_in
from sentinel_agent.replay.places import ModuleStack, Place, place, place_inside_backward, quick_place
from sentinel_agent.replay.taint import Causes, Event, Taint, merged, storage, strongest

# fmt: off
VIEWS: Final = frozenset({
    "view", "reshape", "_unsafe_view", "expand", "permute", "transpose", "t", "slice", "select", "unsqueeze", "squeeze", "alias",
    "detach", "as_strided", "split", "split_with_sizes", "chunk", "unbind", "lift_fresh", "unfold", "narrow", "diagonal",
    "view_as_real", "view_as_complex", "_reshape_alias", "movedim", "swapaxes",
})
"""Results share their input's storage: they change nothing."""
ALLOCATIONS: Final = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_", "resize_storage_bytes_",
    "empty_permuted", "_empty_affine_quantized",
})
"""Results hold whatever was in memory."""
OVERWRITES: Final = frozenset({
    "copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_", "allgather_", "_allgather_base_",
    "broadcast_", "random_", "bernoulli_", "_foreach_zero",
})
"""The destination's old contents are no input."""
# fmt: on
SNAPSHOT_BELOW: Final = 1 << 20  # elements of an in-place op's destination that are kept until its result is known
MAX_EVENTS: Final = 4096


@dataclass(slots=True)
class _Call:
    """One op while it runs."""

    name: str
    base: str
    inputs: list[Tensor]
    written: list[Tensor]
    bad: list[Tensor]
    causes: Causes
    infinite_only: bool
    scalars: list[float]
    before: tuple[OperandStatistics, ...] | None
    snapshots: list[tuple[Tensor, Tensor]]


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode for the live step. ``recast`` is the dtype that casts to half precisions are turned into, if any."""

    def __init__(self, modules: ModuleStack, recast: torch.dtype | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.taint = Taint()
        self.events: list[Event] = []
        self.ops = 0
        self.paused = False
        self.low_precision = False
        self._modules = modules
        self._recast = recast
        self._forward: dict[int, tuple[tuple[str, int] | None, str | None]] = {}

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Ops of the replay's own, which are no part of the step."""
        was, self.paused = self.paused, True
        try:
            with torch._C.DisableTorchFunction():  # a precision override must not touch what is read from the bundle
                yield
        finally:
            self.paused = was

    def arrived(self, tensor: Tensor, what: str) -> None:
        """Name a tensor from outside of the step: a batch, a parameter, a buffer."""
        self.taint.name(tensor, what)

    def entered(self, tensor: Tensor, what: str) -> None:
        """An input of the model. A constant in it (not a mask's -inf) is the batch's fault, whatever op chokes on it later."""
        causes = self.taint.of(tensor)
        if not causes or any(not event.is_constant for event in causes):
            return
        with self.pause():
            looked = describe(tensor)
            if not (looked.nan or looked.posinf):
                return
            found = causes[0].found.model_copy(
                update={"op": "arrived", "kind": "arrived", "what": what, "inputs": (looked,), "rows": bad_rows(tensor)}
            )
            self.taint.set(tensor, (self._event(found, causes),))

    def blame(self, tensor: Tensor | None) -> Causes:
        """Causes of a nonfinite tensor, the ones that explain most first; empty if it is finite."""
        if tensor is None:
            return ()
        with self.pause():
            return () if is_finite(tensor) else strongest(self._causes(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        self.ops += 1
        kwargs = self._recasted(kwargs)
        call = self._before(func, args, kwargs)
        result = func(*args, **kwargs)
        self._note_forward()
        self._after(call, result)
        return result

    def _recasted(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        dtype = kwargs.get("dtype")
        if dtype not in (torch.float16, torch.bfloat16):
            return kwargs
        self.low_precision = True
        return kwargs if self._recast is None else {**kwargs, "dtype": self._recast}

    def _before(self, func: Any, args: Any, kwargs: dict[str, Any]) -> _Call:
        name = str(func)
        base = name.split("::")[-1].split(".")[1] if "." in name else name
        leaves = tree_leaves((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        written, outs = _written(func, args, kwargs)
        if outs or base in OVERWRITES:
            hidden = {id(tensor) for tensor in (written if base in OVERWRITES else outs)}
            inputs = [tensor for tensor in inputs if id(tensor) not in hidden]
        if base in ALLOCATIONS:
            inputs = []
        bad = [tensor for tensor in inputs if self._is_bad(tensor)]
        return _Call(
            name,
            base,
            inputs,
            written,
            bad,
            merged(self._causes(tensor) for tensor in bad),
            bool(bad) and not any(has_nan(tensor) for tensor in bad),
            [leaf for leaf in leaves if isinstance(leaf, float) and not math.isfinite(leaf)],
            describe_all(inputs) if bad and written else None,
            self._snapshots(inputs, written) if written and not bad else [],
        )

    def _is_bad(self, tensor: Tensor) -> bool:
        """Reads a tensor only if its storage is known to hold something nonfinite, or was never looked at."""
        if self.taint.of(tensor):
            return not is_finite(tensor)
        if self.taint.seen(tensor):
            return False
        if is_finite(tensor):
            self.taint.clear(tensor)
            return False
        return True

    def _snapshots(self, inputs: list[Tensor], written: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Copies of what the op will overwrite, for statistics of its inputs should the result be nonfinite."""
        destroyed = {id(tensor) for tensor in written}
        return [
            (tensor, tensor.detach().clone())
            for tensor in inputs
            if id(tensor) in destroyed and type(tensor) is Tensor and tensor.numel() <= SNAPSHOT_BELOW
        ]

    def _causes(self, tensor: Tensor) -> Causes:
        """Causes of a nonfinite tensor; one that nobody has seen before arrived from outside."""
        causes = self.taint.of(tensor)
        if causes:
            return causes
        name = self.taint.name_of(tensor)
        if name is None and tensor.dim() == 0:  # a number that the user wrote, such as in ``x[mask] = float("inf")``
            constant = BadOp(
                op="constant", kind="constant", phase=_phase(), inputs=(describe(tensor),), **self._where(tensor)
            )
            return (self._event(constant),)
        what = name or "a tensor made before the step"
        found = BadOp(
            op="arrived", kind="arrived", phase=_phase(), what=what, inputs=(describe(tensor),), **self._where(tensor)
        )
        event = self._event(found)
        self.taint.set(tensor, (event,))
        return (event,)

    def _after(self, call: _Call, result: Any) -> None:
        if call.base in ALLOCATIONS:
            for tensor in tensors_in((result,)):
                self.taint.clear(tensor)
            return
        outputs = list(tensors_in((result,)))
        outputs += [tensor for tensor in call.written if not any(tensor is one for one in outputs)]
        for tensor in outputs:
            self._judge(call, tensor)

    def _judge(self, call: _Call, output: Tensor) -> None:
        if call.base in VIEWS and (self.taint.seen(output) or self.taint.of(output)):
            return
        self.low_precision = self.low_precision or output.dtype in (torch.float16, torch.bfloat16)
        if is_finite(output):
            if (call.base not in VIEWS and _covers(output)) or not self.taint.of(output):
                self.taint.clear(output)
            return
        self.taint.set(output, self._result_causes(call, output))

    def _result_causes(self, call: _Call, output: Tensor) -> Causes:
        call_bad = call.bad
        if not call_bad:  # cheap look-ups found nothing: read the inputs, now that it matters
            place = storage(output)
            call_bad = [t for t in call.inputs if storage(t) != place and not is_finite(t)]
            if call_bad:
                call.causes = merged(self._causes(tensor) for tensor in call_bad)
                call.infinite_only = not any(has_nan(tensor) for tensor in call_bad)
        if not call_bad:
            constant = bool(call.scalars) or not any(t.is_floating_point() for t in call.inputs)
            known = self.taint.of(output)
            if constant and not call.scalars and known:
                return known
            return (self._made(call, output, "constant" if constant else "created"),)
        strong = tuple(event for event in call.causes if not event.is_constant)
        if strong:
            return strong
        if call.infinite_only and has_nan(output):
            return (self._made(call, output, "escalated", call.causes),)
        return call.causes

    def _made(self, call: _Call, output: Tensor, kind: Any, parents: Causes = ()) -> Event:
        saved = {id(tensor): copy for tensor, copy in call.snapshots}
        inputs = call.before or describe_all(saved.get(id(tensor), tensor) for tensor in call.inputs)
        found = BadOp(
            op=call.name,
            kind=kind,
            phase="reduction" if call.name.startswith(("c10d.", "_c10d_functional.")) else _phase(),
            inputs=inputs,
            outputs=(describe(output),),
            **self._where(output),
        )
        return self._event(found, parents)

    def _event(self, found: BadOp, parents: Causes = ()) -> Event:
        event = Event(self.ops * 1000 + len(self.events) % 1000, found, parents)
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
        return event

    def _note_forward(self) -> None:
        """Remember line and module of the autograd node just made, to name both when it runs backward."""
        if torch._C._current_graph_task_id() == -1 and torch.is_grad_enabled():
            number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            if number not in self._forward:
                self._forward[number] = (quick_place(), self._modules.current)

    def _where(self, tensor: Tensor) -> dict[str, Any]:
        """Line, module and autograd node of what is running now."""
        rows = bad_rows(tensor)
        node = torch._C._current_autograd_node() if _phase() == "backward" else None
        if node is None:
            return _located(place(), self._modules.current) | {"rows": rows}
        where = self._forward.get(node._sequence_nr()) if hasattr(node, "_sequence_nr") else None
        at = place_inside_backward()
        if at is None and where is not None and where[0] is not None:
            at = Place(*where[0])
        return _located(at or place(), where[1] if where else None) | {"rows": rows, "node": node.name()}


def _located(at: Place | None, module: str | None) -> dict[str, Any]:
    if at is None:
        return {"module": module}
    return {"module": module, "line": at.short, "file": at.file, "code": at.code, "stack": at.stack}


def _phase() -> Any:
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


def _covers(output: Tensor) -> bool:
    """True if a write to ``output`` replaces all that its storage holds."""
    local = getattr(output, "_local_tensor", output)
    if local.layout is not torch.strided:
        return True
    return bool(local.numel() * local.element_size() >= local.untyped_storage().nbytes())


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Arguments that the op writes, and those among them whose old contents it does not read."""
    schema = getattr(func, "_schema", None)
    if (
        str(func).startswith("c10d.") and args
    ):  # collectives write their first argument, which their schema does not say
        return list(tensors_in((args[0],))), []
    if schema is None or not schema.is_mutable:
        return [], []
    written: list[Tensor] = []
    outs: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        some = list(tensors_in((value,)))
        written += some
        if argument.is_out or argument.name in ("out", "output"):
            outs += some
    return written, outs
