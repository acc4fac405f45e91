"""Gradients between their reduction and the step: written, clipped, unscaled by whoever, and applied.

Owns the looks at them there: at gradients that no collective has carried, at those that a script has written since they were
reduced, and whether their reduction is over at all. In plain DDP training none of these reads anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from sentinel.wire.messages import REWRITTEN, Phase
from sentinel_agent.check import scalar_check
from sentinel_agent.pending import Pending
from sentinel_agent.rounds import Round
from sentinel_agent.scan import Scan


class Keeper(Protocol):
    """Where the open round is kept; ``ledger.Ledger`` is one."""

    round: Round

    @property
    def latch(self) -> Callable[..., None]:
        """Send evidence and remember that the open round has some."""

    def misused(self, note: str) -> None:
        """Something was called in a wrong order."""


class Handover:
    """Looks at gradients on behalf of a ledger. ``gradients()`` gives those there are, by name."""

    def __init__(
        self,
        scan: Scan,
        ledger: Keeper,
        pending: Pending,
        gradients: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    ) -> None:
        self._scan = scan
        self._ledger = ledger
        self._pending = pending
        self._gradients = gradients

    def needed(self, parameters: Iterable[torch.Tensor]) -> None:
        """Gradients of these parameters are about to be clipped or applied: checks are finished first, and so is their reduction.

        To wait for that is what the loop has to do; that it has not done so is told, since without us it would go wrong.
        """
        given = {id(tensor) for reduction in self._pending.under_way() for tensor in reduction.outputs}
        if given and any(id(parameter.grad) in given for parameter in parameters):
            self._ledger.misused("used_under_way")
        self._pending.join()

    def stepping(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer is about to step, or to be left out. True if anything wrote its gradients since they were last looked at."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.needed(parameters)
        wrote = self._scan.wrote_gradients_of(optimizer)
        if wrote:
            self._look_at_rewritten(parameters)
        return wrote

    def clipping(self, parameters: list[torch.Tensor]) -> None:
        """Gradients of these parameters are about to be clipped."""
        self.needed(parameters)
        self.look_at_own()
        if self._scan.rewrote(parameters):
            self._look_at_rewritten(parameters)

    def clipped(self, parameters: list[torch.Tensor], norm: Any) -> None:
        """The norm that clipping computed: if it is nonfinite though no gradient is, the whole update is multiplied by zero."""
        if (
            isinstance(norm, torch.Tensor)
            and norm.device.type == "cpu"
            and not math.isfinite(value := float(norm.detach()))
        ):
            current = self._ledger.round
            if not (current.gradient_nonfinite or current.spoilt or self._scan.gradients().nonfinite):
                self._ledger.latch(Phase.CLIP, scalar_check(value), value=value)
        self.rewritten(parameters)

    def unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """A scaler has unscaled this optimizer's gradients."""
        self.rewritten([p for group in optimizer.param_groups for p in group["params"]])

    def rewritten(self, parameters: list[torch.Tensor]) -> None:
        """Clipping or unscaling has written these gradients, which makes nothing of them that was not seen before."""
        if self._ledger.round.dirty:
            self._scan.mark_gradients(parameters)

    def look_at_own(self) -> None:
        """Gradients that no collective of this round has carried are looked at before they are clipped, or else applied."""
        current = self._ledger.round
        if current.looked or current.synced or current.carried or not current.backwards:
            return
        current.looked = True
        self._look(Phase.RAW, (gradient for _, gradient in self._gradients()))

    def _look_at_rewritten(self, parameters: list[torch.Tensor]) -> None:
        """The script has written gradients since they were reduced, as loops do that average them: they may be others now.

        Those of the caller's parameters alone: a model may have an optimizer for each of its parameters.
        """
        current = self._ledger.round
        if current.synced and not (current.gradient_nonfinite or current.derived_nonfinite or current.spoilt):
            written = (parameter.grad for parameter in parameters if parameter.grad is not None)
            current.spoilt = self._look(Phase.APPLIED, written, REWRITTEN)

    def _look(self, phase: Phase, gradients: Iterable[torch.Tensor], note: str = "") -> bool:
        """Latch nonfinite gradients, if there are any among these."""
        if self._scan.gradients_look_finite(gradients, anywhere=self._ledger.round.loss_nonfinite):
            return False
        found = self._scan.gradients()
        if found.nonfinite:
            self._ledger.latch(phase, found.found, parameters=found.names, total=found.total, note=note)
        return found.nonfinite
