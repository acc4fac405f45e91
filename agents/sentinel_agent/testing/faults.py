"""Faults written down before they happen: ``FaultPlan(seed).nan_at(rank=1, round=3, phase="raw")``.

Owns how a plan is made and whether all of it came true. Every rank makes the same plan and puts it in with ``install``; what
happens where is ``injection.py``'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Required, TypedDict, Unpack

from sentinel.wire.messages import Phase
from sentinel_agent.agent import Agent
from sentinel_agent.taps import wire
from sentinel_agent.testing.fault import Fault, What
from sentinel_agent.testing.injection import Injection


class Where(TypedDict, total=False):
    """Where a fault happens. ``rank`` None means every rank; ``phase`` is ``raw``, ``wire`` or ``reduced``."""

    rank: Required[int | None]
    round: Required[int]
    phase: str
    parameter: str | None
    collective: int


class FaultPlan:
    """Faults in the order they were written down. ``seed`` picks elements, bits and parameters that are left open."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.faults: list[Fault] = []
        self._injections: list[Injection] = []

    def nan_at(self, **where: Unpack[Where]) -> FaultPlan:
        """One element becomes NaN."""
        return self._add(What.VALUE, math.nan, where)

    def inf_at(self, **where: Unpack[Where]) -> FaultPlan:
        """One element becomes infinite."""
        return self._add(What.VALUE, math.inf, where)

    def value_at(self, value: float, **where: Unpack[Where]) -> FaultPlan:
        """One element becomes ``value``, such as one that a narrower dtype or a sum cannot hold."""
        return self._add(What.VALUE, value, where)

    def bit_flip_at(self, **where: Unpack[Where]) -> FaultPlan:
        """One bit of one element's fraction flips."""
        return self._add(What.BIT_FLIP, 0.0, where)

    def sign_at(self, **where: Unpack[Where]) -> FaultPlan:
        """The whole tensor changes its sign."""
        return self._add(What.SIGN, 0.0, where)

    def scale_at(self, factor: float, **where: Unpack[Where]) -> FaultPlan:
        """The whole tensor is multiplied by ``factor``."""
        return self._add(What.SCALE, factor, where)

    def lost_contribution_at(self, **where: Unpack[Where]) -> FaultPlan:
        """What the rank gave is not in the result; the rank itself saw it go."""
        return self._add(What.LOST, 0.0, where, Phase.WIRE)

    def duplicated_contribution_at(self, **where: Unpack[Where]) -> FaultPlan:
        """What the rank gave is in the result twice."""
        return self._add(What.DUPLICATED, 0.0, where, Phase.WIRE)

    def stale_contribution_at(self, **where: Unpack[Where]) -> FaultPlan:
        """What the rank gave in the round before is in the result, in place of this round's."""
        return self._add(What.STALE, 0.0, where, Phase.WIRE)

    def weights_at(self, amount: float = 0.5, **where: Unpack[Where]) -> FaultPlan:
        """One weight grows by ``amount`` before the round's forward."""
        return self._add(What.SHIFT, amount, where, Phase.PARAMS)

    def _add(self, what: What, amount: float, where: Where, phase: Phase | None = None) -> FaultPlan:
        """Raises ValueError for a phase in which this fault cannot happen."""
        wanted = Phase(where.get("phase", phase or Phase.RAW))
        if wanted not in ((phase,) if phase is not None else (Phase.RAW, Phase.WIRE, Phase.REDUCED)):
            raise ValueError(f"no fault {what} in phase {wanted}")
        if where.get("parameter") is not None and wanted in (Phase.WIRE, Phase.REDUCED):
            raise ValueError(f"phase {wanted} knows collectives, not parameters")
        self.faults.append(
            Fault(
                what=what,
                rank=where["rank"],
                round=where["round"],
                phase=wanted,
                parameter=where.get("parameter"),
                collective=where.get("collective", 0),
                amount=amount,
            )
        )
        return self

    def around(self, listener: wire.Listener, rank: int, now: Callable[[], int]) -> Injection:
        """A listener for ``taps.wire.install`` that puts the faults of ``rank`` in around ``listener``."""
        injection = Injection(self.faults, self.seed, listener, rank, now)
        self._injections.append(injection)
        return injection

    def install(self, agent: Agent) -> Injection:
        """Put the faults in around a started agent, whose rank and count of rounds they follow."""
        injection = self.around(agent, agent.me.rank, lambda: agent.ledger.round.number)
        wire.install(injection)
        return injection

    def assert_fired(self) -> None:
        """Raise AssertionError if a fault of this process did not happen, naming it."""
        missing = [fault for injection in self._injections for fault in injection.missing()]
        assert not missing, f"faults that did not happen: {missing}"
