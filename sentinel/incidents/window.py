"""The reports of one round, joined: who saw what, who closed it, who is missing.

Owns the join and the questions that rules ask of it. Decides nothing; deadlines belong to ``tracker.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sentinel.wire.messages import Evidence, Phase, Role, RoundClosed

GRADIENT_PHASES = frozenset({Phase.RAW, Phase.WIRE, Phase.REDUCED})


@dataclass(slots=True)
class RoundWindow:
    """Reports of round ``round`` of attempt ``attempt``; delivered at least once, so repeats are dropped here."""

    attempt: int
    round: int
    opened_at: float
    touched_at: float = 0.0
    closed: dict[int, RoundClosed] = field(default_factory=dict)
    _evidence: dict[tuple[int, int], Evidence] = field(default_factory=dict)

    def add(self, report: Evidence | RoundClosed, now: float) -> None:
        """Join one report. A repeat of the same (rank, order) changes nothing."""
        self.touched_at = now
        if isinstance(report, RoundClosed):
            self.closed.setdefault(report.rank, report)
        else:
            self._evidence.setdefault((report.rank, report.order), report)

    @property
    def has_evidence(self) -> bool:
        """True if any rank saw something in this round, or began it with parameters known to be nonfinite."""
        return bool(self._evidence) or any(c.params_nonfinite for c in self.closed.values())

    @property
    def has_nonfinite(self) -> bool:
        """True if any rank saw a nonfinite value (a wrong call or a clipped norm is evidence too, but of something else)."""
        if any(c.params_nonfinite for c in self.closed.values()):
            return True
        return any(e.phase not in (Phase.CLIP, Phase.MISUSE, Phase.EXIT) for e in self._evidence.values())

    @property
    def evidence(self) -> list[Evidence]:
        """All evidence, by rank and then in the order that rank met it."""
        return [self._evidence[key] for key in sorted(self._evidence)]

    def of_rank(self, rank: int) -> list[Evidence]:
        """One rank's evidence in the order it was met."""
        return [e for e in self.evidence if e.rank == rank]

    def of_phase(self, *phases: Phase) -> list[Evidence]:
        """Evidence seen in any of ``phases``."""
        return [e for e in self.evidence if e.phase in phases]

    def ranks_of(self, *phases: Phase) -> tuple[int, ...]:
        """Ranks with evidence in any of ``phases``, ascending."""
        return tuple(sorted({e.rank for e in self.of_phase(*phases)}))

    def incomplete(self, expected: Iterable[int]) -> tuple[int, ...]:
        """Expected ranks that have not closed the round, or whose evidence is not all here yet."""
        return tuple(rank for rank in expected if not self._is_whole(rank))

    def _is_whole(self, rank: int) -> bool:
        closed = self.closed.get(rank)
        if closed is None:
            return False
        return closed.evidence == 0 or sum(1 for key in self._evidence if key[0] == rank) >= closed.evidence

    def step(self, ranks: Iterable[int] = ()) -> int:
        """The training iteration of this round, as the named ranks' clocks say (else any rank's)."""
        for rank in (*ranks, *sorted(self.closed)):
            if rank in self.closed:
                return self.closed[rank].step
        return min((e.step for e in self._evidence.values()), default=self.round)

    def gradient_evidence(self) -> list[Evidence]:
        """Evidence about gradients: raw ones, and collectives whose role is a gradient's or derived from one."""
        return [e for e in self.of_phase(*GRADIENT_PHASES) if role_of(e) in (Role.GRADIENT, Role.DERIVED)]


def role_of(evidence: Evidence) -> Role:
    """Role of the collective the evidence is about; evidence without a collective is about a gradient itself."""
    return evidence.collective.role if evidence.collective is not None else Role.GRADIENT
