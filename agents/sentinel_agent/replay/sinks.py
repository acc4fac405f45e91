"""Where nonfinite values count: the loss, gradients as autograd makes them, what goes to a reduction, and gradients at the step.

Owns the order: the first of these that is nonfinite is what the replay explains. Keeps the recomputed gradients for comparison.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from sentinel.bundle.replayed import GradientComparison
from sentinel_agent.contents import local
from sentinel_agent.naming import Naming
from sentinel_agent.replay.bits import differing, digest
from sentinel_agent.replay.operands import is_finite
from sentinel_agent.replay.recording import Recording
from sentinel_agent.replay.taint import Causes, strongest
from sentinel_agent.replay.tracer import Tracer
from sentinel_agent.replay.world import Contributions
from sentinel_agent.roles import storage_of
from sentinel_agent.taps.leaving import frames_of, nan_left
from sentinel_agent.taps.wire import Call

MAX_KEPT: Final = 16  # states of one gradient that are compared with the recorded one


class Owner(Protocol):
    """Whose sinks these are; ``session.Session`` is one."""

    tracer: Tracer

    @property
    def live(self) -> bool:
        """True inside the recorded round."""


class Sinks:
    """What became nonfinite, in order, and because of what."""

    def __init__(self, owner: Owner, recording: Recording) -> None:
        self.loss_value: float | None = None
        self.found: list[tuple[str, Causes]] = []
        self.nonfinite_gradients: dict[str, None] = {}
        self.contributions: Contributions = []
        self.keep_contributions = False
        self._owner = owner
        self._recording = recording
        self._hooked: set[int] = set()
        self._raw: dict[str, list[Tensor]] = {}
        self._seen: list[tuple[str, Tensor]] = []
        self._reduced: set[int] = set()
        self._naming: Naming | None = None

    @property
    def nonfinite(self) -> bool:
        """True if anything that counts was nonfinite."""
        return bool(self.found)

    @property
    def first(self) -> tuple[str, Causes]:
        """Name and causes of the first; empty if there was none. Causes come from the first sink that has any."""
        if not self.found:
            return "", ()
        for name, causes in self.found:
            if causes:
                return name, causes
        return self.found[0]

    @property
    def causes(self) -> Causes:
        """All causes of all sinks, the strongest of the first sink first."""
        first = self.first[1]
        rest = {e.order: e for _, causes in self.found for e in causes}
        return (*first, *strongest(tuple(e for e in rest.values() if e not in first)))

    def watch(self, naming: Naming) -> None:
        """Hook the parameters, so that every gradient is seen as autograd makes it."""
        self._naming = naming
        for name, parameter in naming.parameters():
            plain = type(parameter) in (Tensor, nn.Parameter)
            if id(parameter) not in self._hooked and parameter.requires_grad and plain:
                self._hooked.add(id(parameter))
                parameter.register_hook(self._hook(name))  # type: ignore[no-untyped-call]

    def loss(self, roots: list[Any]) -> None:
        """What backward is called on."""
        for root in roots:
            if isinstance(root, Tensor) and root.numel() == 1:
                self.loss_value = float(local(root.detach()))
            if isinstance(root, Tensor):
                self._look("loss", root)

    def left_by(self, error: BaseException) -> None:
        """What an exception left behind of a step that came to no loss: the loss function itself may refuse NaN."""
        for tensor, _, where in nan_left(list(frames_of(error.__traceback__))):
            self._look(f"what was left of the forward ({where})", tensor)

    def sharded_gradient(self, name: str, gradient: Tensor) -> None:
        """An unsharded gradient that FSDP is about to reduce."""
        self._gradient(name, gradient)
        self._keep(name, gradient)

    def wire(self, call: Call, parts: list[Tensor], index: int) -> None:
        """What a reduction is given. Gradients are taken here as the agent took them: just before a collective writes them."""
        if self.keep_contributions:
            self.contributions.append([part.detach().clone() for part in parts])
        self._take_raw()
        for part in parts:
            self._look(f"reduction {index} ({call.op})", part)
        self._reduced.update(storage_of(tensor) for tensor in call.outputs if tensor.layout is torch.strided)

    def final(self, naming: Naming) -> None:
        """The gradients that the optimizer would use."""
        self._naming = naming
        if not self._raw:
            self._take_raw()
        for name, parameter in naming.parameters():
            if parameter.grad is not None and parameter.is_leaf and not is_finite(parameter.grad):
                self.nonfinite_gradients[name] = None
                self._look(f"final gradient {name}", parameter.grad)

    def compared(self) -> tuple[GradientComparison, ...]:
        """Recorded gradients against the recomputed ones; of several reductions in the round, the one that fits best."""
        recorded = self._recording.gradients
        return tuple(
            GradientComparison(
                name=name,
                elements=recorded[name].numel(),
                different=min(differing(recorded[name], mine) for mine in some),
            )
            for name, some in self._raw.items()
        )

    def hash(self) -> str:
        """Digest of every gradient that autograd made, to compare two runs of the same step."""
        return digest(self._seen) if self._seen else ""

    def _hook(self, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            if self._owner.live:
                with self._owner.tracer.pause():
                    self._gradient(name, gradient)

        return hook

    def _gradient(self, name: str, gradient: Tensor) -> None:
        self._seen.append((name, gradient.detach().clone()))
        if not is_finite(gradient):
            self.nonfinite_gradients[name] = None
            self._look(f"gradient {name}", gradient)

    def _take_raw(self) -> None:
        recorded = self._recording.gradients
        if self._naming is None or not recorded:
            return
        for name, parameter in self._naming.parameters():
            gradient = parameter.grad if parameter.is_leaf and type(parameter) in (Tensor, nn.Parameter) else None
            if gradient is not None and storage_of(gradient) not in self._reduced:
                self._keep(name, gradient)

    def _keep(self, name: str, gradient: Tensor) -> None:
        kept = self._raw.setdefault(name, []) if name in self._recording.gradients else None
        if kept is not None and len(kept) < MAX_KEPT:
            kept.append(gradient.detach().clone())

    def _look(self, name: str, tensor: Tensor) -> None:
        if not is_finite(tensor):
            self.found.append((name, self._owner.tracer.blame(tensor)))
