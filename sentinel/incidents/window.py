"""The reports of one round, joined: who saw what, who closed it, who is missing.

Owns the join and the questions that rules ask of it. Decides nothing; deadlines belong to ``tracker.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from sentinel.wire.messages import ClosedBy, Evidence, Guarded, Phase, Role, RoundClosed

GRADIENT_PHASES = frozenset({Phase.RAW, Phase.WIRE, Phase.REDUCED})
NOT_A_VALUE = frozenset({Phase.CLIP, Phase.MISUSE, Phase.AUDIT, Phase.EXIT})
"""Phases whose evidence is of something else than a nonfinite value on its way."""


@dataclass(slots=True)
class RoundWindow:
    """Reports of round ``round`` of attempt ``attempt``; delivered at least once, so repeats are dropped here."""

    attempt: int
    round: int
    opened_at: float
    touched_at: float = 0.0
    closed: dict[int, RoundClosed] = field(default_factory=dict)
    has_evidence: bool = False  # any rank saw something, or began the round with parameters known to be nonfinite
    has_nonfinite: bool = (
        False  # the same, of values alone: a wrong call or a clipped norm is evidence of something else
    )
    joined: frozenset[int] = frozenset()  # ranks left out of ``closed`` by ``active``
    _of_rank: dict[int, dict[int, Evidence]] = field(default_factory=dict)
    _whole: set[int] = field(default_factory=set)

    def add(self, report: Evidence | RoundClosed, now: float) -> bool:
        """Join one report. False for a repeat, which changes nothing."""
        self.touched_at = now
        new = self._add_closed(report) if isinstance(report, RoundClosed) else self._add_evidence(report)
        if new and self._is_whole(report.rank):
            self._whole.add(report.rank)
        return new

    def _add_closed(self, report: RoundClosed) -> bool:
        if report.rank in self.closed:
            return False
        self.closed[report.rank] = report
        if report.params_nonfinite:
            self.has_evidence = self.has_nonfinite = True
        return True

    def _add_evidence(self, report: Evidence) -> bool:
        known = self._of_rank.setdefault(report.rank, {})
        if report.order in known:
            return False
        known[report.order] = report
        self.has_evidence = True
        self.has_nonfinite = self.has_nonfinite or report.phase not in NOT_A_VALUE
        return True

    @property
    def is_training(self) -> bool:
        """False for what is left over when processes end between two rounds, with something seen and nothing trained."""
        ends = [c for c in self.closed.values() if c.closed_by is ClosedBy.EXIT and not (c.forwards or c.backwards)]
        return not ends or len(ends) < len(self.closed)

    @property
    def whole(self) -> int:
        """How many ranks have told all of the round."""
        return len(self._whole)

    @property
    def evidence(self) -> list[Evidence]:
        """All evidence, by rank and then in the order that rank met it."""
        return [e for rank in sorted(self._of_rank) for e in self.of_rank(rank)]

    def of_rank(self, rank: int) -> list[Evidence]:
        """One rank's evidence in the order it was met."""
        known = self._of_rank.get(rank, {})
        return [known[order] for order in sorted(known)]

    def gapless(self, before: Evidence) -> bool:
        """True if everything that the rank met before this evidence is here: else what came first is not known."""
        known = self._of_rank.get(before.rank, {})
        return all(order in known for order in range(before.order))

    def of_phase(self, *phases: Phase) -> list[Evidence]:
        """Evidence seen in any of ``phases``."""
        return [e for e in self.evidence if e.phase in phases]

    def ranks_of(self, *phases: Phase) -> tuple[int, ...]:
        """Ranks with evidence in any of ``phases``, ascending."""
        return tuple(sorted({e.rank for e in self.of_phase(*phases)}))

    def incomplete(self, expected: Iterable[int]) -> tuple[int, ...]:
        """Expected ranks that have not closed the round, or whose evidence is not all here yet."""
        return tuple(rank for rank in expected if rank not in self._whole)

    def _is_whole(self, rank: int) -> bool:
        closed = self.closed.get(rank)
        return closed is not None and len(self._of_rank.get(rank, ())) >= closed.evidence

    @property
    def broken_off(self) -> bool:
        """True if a rank ended in the middle of the round: its collectives, and the others', are not all there."""
        most = max((c.backwards for c in self.closed.values()), default=0)
        return any(c.closed_by is ClosedBy.EXIT and c.backwards < max(most, 1) for c in self.closed.values())

    @property
    def guarded(self) -> Guarded:
        """What the guard did about this round's step: the same on every rank that stepped."""
        did = {one.guarded for one in self.closed.values()} - {Guarded.NO}
        return max(did, key=list(Guarded).index, default=Guarded.NO)

    def active(self) -> RoundWindow:
        """The round without ranks that only shadowed it: they gave zeros and stepped nothing."""
        joined = frozenset(rank for rank, one in self.closed.items() if one.closed_by is ClosedBy.JOINED)
        if not joined:
            return self
        return replace(self, joined=joined, closed={r: c for r, c in self.closed.items() if r not in joined})

    def step(self, ranks: Iterable[int] = ()) -> int:
        """The training iteration of this round, as the named ranks' clocks say (else any rank's)."""
        trained = [rank for rank, one in self.closed.items() if one.closed_by is not ClosedBy.JOINED] or list(
            self.closed
        )
        told = next((rank for rank in ranks if rank in self.closed), min(trained, default=None))
        if told is not None:
            return self.closed[told].step
        return min((e.step for e in self.evidence), default=self.round)

    def gradient_evidence(self) -> list[Evidence]:
        """Evidence about gradients: raw ones, and collectives whose role is a gradient's or derived from one."""
        return [e for e in self.of_phase(*GRADIENT_PHASES) if role_of(e) in (Role.GRADIENT, Role.DERIVED)]


def role_of(evidence: Evidence) -> Role:
    """Role of the collective the evidence is about; evidence without a collective is about a gradient itself."""
    return evidence.collective.role if evidence.collective is not None else Role.GRADIENT
