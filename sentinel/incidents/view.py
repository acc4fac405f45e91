"""One round as the rules of ``classify.py`` see it.

Owns what a rule may ask for. The joining of reports is ``window.py``'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from sentinel.incidents.scaler import ScalerHistory
from sentinel.incidents.window import RoundWindow
from sentinel.wire.messages import ClosedBy, Evidence, Phase, Role


@dataclass(frozen=True, slots=True)
class View:
    """One round as the rules see it. ``missing``: ranks whose reports are not (all) here."""

    window: RoundWindow
    world: tuple[int, ...]
    missing: tuple[int, ...]
    scaler: ScalerHistory
    losses_grew: bool = False

    @property
    def losses(self) -> list[Evidence]:
        """Nonfinite losses; a nonfinite scalar reduction or root output stands in only where a forward had no backward."""
        found = self.window.of_phase(Phase.LOSS)
        closed = self.window.closed.values()
        stepped = any(c.closed_by in (ClosedBy.OPTIMIZER, ClosedBy.SCALER_SKIP) for c in closed)
        if found or stepped or not any(c.forwards for c in closed):
            return found
        return [
            e
            for e in self.window.evidence
            if e.phase is Phase.OUTPUT or (e.phase is Phase.WIRE and e.collective and e.collective.role is Role.SCALAR)
        ]

    def group_of(self, evidence: Evidence) -> tuple[int, ...]:
        """Global ranks of the group whose collective the evidence is about; the world if it is about none, or all of it."""
        return (evidence.collective.ranks if evidence.collective else ()) or self.world
