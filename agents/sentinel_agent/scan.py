"""Looks at parameters, gradients and buffers by name: expensive, so only when a check found something, or once at the start.

Owns which tensors are looked at and what they are called; single checks are ``check.py``'s.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from sentinel.wire.messages import Check
from sentinel_agent.check import EMPTY, check_one, local_part, merged, norms_of
from sentinel_agent.naming import Naming
from sentinel_agent.roles import storage_of
from sentinel_agent.rounds import Reduction
from sentinel_agent.taps import fsdp

MAX_NAMES = 32
MAX_BUFFERS = 256
SMALL_BUFFER = 65536  # elements
_COMMON = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a look at many tensors found: ``names`` are the nonfinite ones (at most 32 of ``total``)."""

    found: Check
    names: tuple[str, ...] = ()
    total: int = 0
    narrowed: bool = False
    looked: bool = True  # False: there was nothing to look at

    @property
    def nonfinite(self) -> bool:
        """True if any of the tensors was nonfinite."""
        return self.found.nonfinite


class Scan:
    """Named looks at the state of the training."""

    def __init__(self, naming: Naming) -> None:
        self.naming = naming
        self._sampled: list[_Sample] = []
        self._trained: list[weakref.ref[Any]] = []  # roots and optimizers there were then
        self._marks: dict[int, tuple[weakref.ref[torch.Tensor] | None, int]] = {}
        self._finite_at_start: set[str] | None = None
        self._small_buffers: list[weakref.ref[torch.Tensor]] = []
        self.buffers_at_start = Scanned(EMPTY)  # those that held NaN before the first forward

    def start(self) -> Scanned:
        """Parameters before the first forward. Infinity in a parameter that is not trained may be meant (a mask): NaN never is."""
        made = [(name, p) for name, p in self.naming.parameters() if not isinstance(p, torch.nn.UninitializedParameter)]
        trained = _look((name, p) for name, p in made if p.requires_grad)
        frozen = _look(((name, p) for name, p in made if not p.requires_grad), nan_only=True)
        return Scanned(
            merged(trained.found, frozen.found),
            (*trained.names, *frozen.names)[:MAX_NAMES],
            trained.total + frozen.total,
        )

    def parameters(self) -> Scanned:
        """All parameters as they are now."""
        return _look(self.naming.parameters())

    def buffers(self) -> Scanned:
        """Buffers that hold NaN, or inf where there was none before (masks of -inf are meant)."""
        found = _look(self.naming.buffers())
        if self._finite_at_start is None:
            return found if found.found.nan else Scanned(EMPTY)
        finite = self._finite_at_start
        became = _look((name, buffer) for name, buffer in self.naming.buffers() if name in finite)
        masks = _look(((n, b) for n, b in self.naming.buffers() if n not in finite), nan_only=True)
        names = (*became.names, *masks.names)[:MAX_NAMES]
        return Scanned(merged(became.found, masks.found), names, became.total + masks.total)

    def remember_buffers(self) -> None:
        """Note which buffers are finite before the training begins, and which of those are small enough to look at every round."""
        named = [(name, part) for name, buffer in self.naming.buffers() if (part := local_part(buffer)) is not None]
        finite = [(name, part) for name, part in named if not check_one(part).nonfinite]
        self._finite_at_start = {name for name, _ in finite}
        self.buffers_at_start = _look(((n, p) for n, p in named if n not in self._finite_at_start), nan_only=True)
        self._small_buffers = [
            weakref.ref(b) for n, b in self.naming.buffers() if n in self._finite_at_start and _is_small(b)
        ]

    def buffers_look_finite(self) -> bool:
        """One cheap look at the small buffers (BatchNorm statistics): False if any might be nonfinite. Host memory only."""
        alive = [buffer for ref in self._small_buffers[:MAX_BUFFERS] if (buffer := ref()) is not None]
        if not alive:
            return True
        return bool(torch.isfinite(torch.stack(torch._foreach_norm(alive)).sum()))

    def gradients(self) -> Scanned:
        """Every ``.grad`` as it is now."""
        return _look((name, p.grad) for name, p in self.naming.parameters() if p.grad is not None)

    def gradients_look_finite(self, gradients: Iterable[torch.Tensor], *, anywhere: bool) -> bool:
        """One read of gradients: False if any might be nonfinite. Those of an accelerator, for which it would have to be waited,
        only if ``anywhere``."""
        parts = [part for gradient in gradients if (part := local_part(gradient)) is not None]
        parts = [part for part in parts if anywhere or part.device.type == "cpu"]
        common = [part for part in parts if part.dtype in _COMMON]
        others = [part for part in parts if part.dtype not in _COMMON]
        if any(check_one(part).nonfinite for part in others):
            return False
        return all(
            math.isfinite(norm)
            for device in {part.device for part in common}
            for norm in norms_of([part for part in common if part.device == device])
        )

    def raw(self, reduction: Reduction, parts: list[torch.Tensor], reduced: set[int]) -> Scanned:
        """Gradients behind a nonfinite wire, as autograd left them; those that a collective already wrote are left out."""
        sharded = fsdp.current()
        if sharded is not None:
            return _of_sharded(sharded, reduction, parts)
        local = [
            (name, p.grad)
            for name, p in self.naming.parameters()
            if p.grad is not None and (storage_of(p.grad) not in reduced)
        ]
        wire_bits = parts[0].element_size()
        if not local:  # FSDP1 takes the gradient away before it reduces it
            narrowed = any(wire_bits < local_part_size(p) for _, p in self.naming.parameters())
            return Scanned(EMPTY, narrowed=narrowed, looked=False)
        looked = _look(local)
        narrowed = any(wire_bits < local_part_size(gradient) for _, gradient in local)
        return Scanned(looked.found, looked.names, looked.total, narrowed)

    def remember_gradients(self) -> None:
        """After a backward: sample a few gradients that it wrote, by optimizer, to tell later whether they were cleared."""
        touched: list[_Sample] = []
        for optimizer, sampled in self._owners():
            for parameter in sampled:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if self._wrote(parameter, gradient):
                    touched.append(_Sample(weakref.ref(parameter), gradient._version, optimizer))
                self._marks[id(parameter)] = (weakref.ref(gradient), gradient._version)
        self._sampled, self._trained = touched, self.naming.alive()

    def _wrote(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Is this gradient another one, or written to, since it was last marked?"""
        ref, version = self._marks.get(id(parameter), (None, -1))
        return ref is None or ref() is not gradient or gradient._version != version

    def rewrote(self, parameters: list[torch.Tensor]) -> bool:
        """Did anything write gradients of these since they were last marked? Only of those that are marked at all."""
        marked = [p for p in (*parameters[:2], *parameters[-2:]) if id(p) in self._marks]
        return any(self._wrote(p, p.grad) for p in marked if p.grad is not None)

    def mark_gradients(self, parameters: list[torch.Tensor]) -> None:
        """Whoever has written those of these gradients that are marked, it is known."""
        for parameter in parameters:
            if id(parameter) in self._marks and parameter.grad is not None:
                self._marks[id(parameter)] = (weakref.ref(parameter.grad), parameter.grad._version)

    def wrote_gradients_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Did anything write gradients of this optimizer since they were last marked? They are marked now."""
        sampled = _sampled(_of(optimizer))
        wrote = any(self._wrote(p, p.grad) for p in sampled if p.grad is not None)
        for parameter in sampled:
            if parameter.grad is not None:
                self._marks[id(parameter)] = (weakref.ref(parameter.grad), parameter.grad._version)
        return wrote

    def _owners(self) -> Iterator[tuple[weakref.ref[torch.optim.Optimizer] | None, list[torch.Tensor]]]:
        """A few parameters with gradients by optimizer; of all that are known where no optimizer is."""
        optimizers = self.naming.optimizers()
        for optimizer in optimizers:
            yield weakref.ref(optimizer), _sampled(_of(optimizer))
        if not optimizers:
            yield None, _sampled([p for _, p in self.naming.parameters()])

    def cleared(self) -> bool:
        """True if every gradient sampled after the last backward is gone or zero now, or all that was trained then is gone."""
        alive = [(p, sample.version) for sample in self._sampled if (p := sample.parameter()) is not None]
        if not alive:
            return bool(self._sampled) and not any(ref() is not None for ref in self._trained)
        return all(_is_cleared(p, version) for p, version in alive)

    def owner(self) -> torch.optim.Optimizer | None:
        """The optimizer whose gradients the last backward wrote, the first of them; None where none is known."""
        return next((o for s in self._sampled if s.optimizer is not None and (o := s.optimizer()) is not None), None)


@dataclass(frozen=True, slots=True)
class _Sample:
    """One gradient as a backward left it."""

    parameter: weakref.ref[torch.Tensor]
    version: int
    optimizer: weakref.ref[torch.optim.Optimizer] | None


def _of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _sampled(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """The first two and the last two of those that have a gradient, each once. Looks at no more than it has to."""
    first = list(islice((p for p in parameters if p.grad is not None), 2))
    last = list(islice((p for p in reversed(parameters) if p.grad is not None), 2))
    return list({id(p): p for p in (*first, *reversed(last))}.values())


def local_part_size(tensor: Any) -> int:
    """Bytes of one element of the tensor's local part, 0 if it cannot be checked."""
    part = local_part(tensor)
    return part.element_size() if part is not None else 0


def _is_small(buffer: torch.Tensor) -> bool:
    plain = type(buffer) is torch.Tensor and buffer.dtype in (torch.float32, torch.float64)
    return plain and buffer.device.type == "cpu" and buffer.numel() <= SMALL_BUFFER


def _is_cleared(parameter: torch.Tensor, version: int) -> bool:
    gradient = parameter.grad
    if gradient is None:
        return True
    if gradient._version == version:
        return False
    if gradient.is_sparse:
        return gradient._nnz() == 0
    part = local_part(gradient)
    return part is not None and part.device.type == "cpu" and not bool(part.any())


def _look(named: Iterable[tuple[str, Any]], *, nan_only: bool = False) -> Scanned:
    names: list[str] = []
    found, total = EMPTY, 0
    for name, tensor in named:
        part = local_part(tensor)
        if part is None:
            continue
        one = check_one(part)
        if nan_only and not one.nan:
            continue
        found = merged(found, one)
        if one.nonfinite:
            total += 1
            if len(names) < MAX_NAMES:
                names.append(name)
    return Scanned(found, tuple(names), total)


def _of_sharded(sharded: fsdp.Unsharded, reduction: Reduction, parts: list[torch.Tensor]) -> Scanned:
    """FSDP2: looked at before the cast if there is one; otherwise the wire holds the very gradients, column by column."""
    if sharded.raw is not None:
        names = tuple(
            name for name, one in zip(sharded.names, sharded.raw, strict=True) if one is not None and one.nonfinite
        )
        found = EMPTY
        for one in sharded.raw:
            found = merged(found, one) if one is not None else found
        return Scanned(found, names[:MAX_NAMES], len(names), narrowed=True)
    names = tuple(sharded.nonfinite_columns(parts[0]))
    return Scanned(reduction.wire, names[:MAX_NAMES], len(names))
