"""Puts the faults of a plan into this process: between the wire tap and its listener, and at the parameters.

Owns the places and their order towards the agent's looks. What a fault does to a tensor is ``fault.py``'s.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sentinel.wire.messages import Phase
from sentinel_agent.naming import named_modules
from sentinel_agent.taps import wire
from sentinel_agent.testing import scatter
from sentinel_agent.testing.fault import IN_FLIGHT, Fault, What, damage


@dataclass(frozen=True, slots=True)
class _Token:
    """What the listener returned, and the faults that wait for the collective's result."""

    inner: Any
    outputs: list[torch.Tensor]
    later: list[int]


class Injection:
    """A listener of the wire tap around another one. ``now`` gives the number of the open round.

    ``fired`` counts by the fault's place in ``faults``; each fires once.
    """

    def __init__(
        self, faults: Sequence[Fault], seed: int, listener: wire.Listener, rank: int, now: Callable[[], int]
    ) -> None:
        self.fired: Counter[int] = Counter()
        self._faults = {i: f for i, f in enumerate(faults) if f.concerns(rank)}
        self._seed = seed
        self._listener = listener
        self._now = now
        self._seen: Counter[int] = Counter()
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._parameters: set[str] = set()
        self._handles: list[Any] = []
        self._hooked: set[int] = set()
        if any(fault.phase is Phase.REDUCED for fault in faults):
            scatter.install()

    def missing(self) -> list[Fault]:
        """Faults of this rank that have not happened."""
        return [fault for number, fault in self._faults.items() if not self.fired[number]]

    # --- collectives ---------------------------------------------------------------------------------------------------

    def before(self, read: wire.Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change what the listener will see, let it look, change what it has seen."""
        call = read(args, kwargs)
        index = self._number(call)
        at_wire = list(self._due(Phase.WIRE, index))
        self._change(call.inputs, [n for n in at_wire if self._faults[n].what not in IN_FLIGHT])
        inner = self._listener.before(read, args, kwargs)
        self._change(call.inputs, [n for n in at_wire if self._faults[n].what in IN_FLIGHT])
        later = list(self._due(Phase.REDUCED, index))
        if later and call.op == scatter.OP:
            scatter.then(partial(self._change, call.outputs, later))
            later = []
        return _Token(inner, call.outputs, later) if later or inner is not None else None

    def _number(self, call: wire.Call) -> int:
        """The collective's number among those of the round that faults can happen to, -1 for another one."""
        if call.op in wire.MOVES or not any(t.is_floating_point() and t.numel() > 1 for t in call.inputs):
            return -1
        index = self._seen[self._now()]
        self._seen[self._now()] += 1
        self._keep(call, index)
        return index

    def after(self, token: _Token, result: Any) -> None:
        """Change the result, once it is there, before the listener looks at it."""
        if token.later:
            wire.work_of(result).wait()
            self._change(token.outputs, token.later)
        if token.inner is not None:
            self._listener.after(token.inner, result)

    def _due(self, phase: Phase, index: int) -> Iterator[int]:
        now = self._now()
        for number, fault in self._faults.items():
            if (fault.phase, fault.round, fault.collective) == (phase, now, index) and not self.fired[number]:
                yield number

    def _keep(self, call: wire.Call, index: int) -> None:
        """A stale contribution is this round's in the next one."""
        for number, fault in self._faults.items():
            if fault.what is What.STALE and (fault.round - 1, fault.collective) == (self._now(), index):
                self._kept[number] = [tensor.detach().clone() for tensor in call.inputs]

    def _change(self, tensors: list[torch.Tensor], numbers: list[int]) -> None:
        for number in numbers:
            fault = self._faults[number]
            choice = self._choice(number)
            one_element = fault.what in (What.VALUE, What.BIT_FLIP, What.SHIFT)
            chosen = [choice.randrange(len(tensors))] if one_element else range(len(tensors))
            kept = self._kept.pop(number, None)
            for i in chosen:
                damage(fault, tensors[i], choice, kept[i] if kept is not None else None)
            self.fired[number] += 1

    def _choice(self, number: int) -> random.Random:
        """The same on every rank, so that a fault of all ranks is one and the same on each."""
        return random.Random(self._seed * 7919 + number)  # noqa: S311 - damage for tests, no secret

    # --- parameters ----------------------------------------------------------------------------------------------------

    def watch(self, model: nn.Module) -> None:
        """Faults of the phases ``raw`` and ``params`` happen to this model's parameters, by their qualified names."""
        for prefix, module in named_modules(model):
            named = {
                f"{prefix}.{name}" if prefix else name: name for name in dict(module.named_parameters(recurse=False))
            }
            if named:
                self._parameters.update(named)
                self._handles.append(module.register_forward_pre_hook(partial(self._about_to_run, named)))

    def _about_to_run(self, named: dict[str, str], module: nn.Module, _inputs: Any) -> None:
        """Before a layer's forward: here a sharded parameter is whole, and autograd will see this very tensor."""
        for number, fault in self._faults.items():
            name = self._name_of(number)
            if name not in named or fault.round != self._now() or number in self._hooked:
                continue
            parameter = getattr(module, named[name])
            if fault.phase is Phase.RAW and parameter.requires_grad:
                self._hooked.add(number)
                self._handles.append(parameter.register_hook(partial(self._gradient, number)))
            elif fault.phase is Phase.PARAMS:
                self._hooked.add(number)
                self._change([parameter.detach()], [number])

    def _gradient(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        if self.fired[number] or self._now() != self._faults[number].round:
            return gradient
        changed = gradient.clone()
        self._change([changed], [number])
        return changed

    def _name_of(self, number: int) -> str:
        """The parameter a fault names, or one of all, chosen alike on every rank."""
        fault = self._faults[number]
        if fault.parameter is not None or not self._parameters:
            return fault.parameter or ""
        return self._choice(number).choice(sorted(self._parameters))

    def remove(self) -> None:
        """Take every hook out again. The wire tap goes back to the inner listener."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._parameters.clear()
        self._kept.clear()
        wire.install(self._listener)
