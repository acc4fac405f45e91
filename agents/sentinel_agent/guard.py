"""Decides at the optimizer's step: pass, skip or halt. Every rank decides the same, since each looks at what all of them share.

Owns the policy, its budget, and what a round's reductions say. What an all-reduce over the whole world returned is common to all
ranks; of a reduce-scatter each rank sees its own shard, on which ``agreement.py`` lets them agree. Where only some ranks share a
result (tensor or pipeline parallel groups, reduce-scatters of a hand-written loop), and inside a backward, where ranks need not be
equally far, the guard decides nothing and says so. How a step is left out is ``taps/withheld.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sentinel.wire.messages import Guarded
from sentinel_agent.errors import Health, say
from sentinel_agent.rounds import Reduction, Round

OBSERVE, SKIP, HALT = POLICIES = ("observe", "skip", "halt")


@dataclass(frozen=True, slots=True)
class Budget:
    """Steps that may be left out, in a row and in all, before the guard halts."""

    consecutive: int
    total: int


class Guard:
    """The decision of one rank: ``note`` it collectives, ``judge`` when a round closes.

    ``everyone_guards()`` says whether every rank of the job has a guard, the same on all of them. Raises ValueError for a policy
    that does not exist.
    """

    def __init__(self, policy: str, budget: Budget, health: Health, everyone_guards: Callable[[], bool]) -> None:
        if policy not in POLICIES:
            raise ValueError(f"no guard policy {policy!r}; there are {', '.join(POLICIES)}")
        self._policy, self._budget = policy, budget
        self._health = health
        self._everyone_guards = everyone_guards
        self._in_a_row = self._in_all = 0
        self._said: set[str] = set()
        self.decision = Guarded.NO
        """What holds for every optimizer's step until the next backward."""

    @property
    def acts(self) -> bool:
        """False under ``observe``: then nothing of a training is ever changed."""
        return self._policy != OBSERVE

    def issued(self, reduction: Reduction, round_: Round) -> None:
        """A gradient collective was issued."""
        round_.private |= not is_shared(reduction)

    def returned_nonfinite(self, reduction: Reduction, round_: Round) -> None:
        """A gradient collective returned something nonfinite."""
        round_.shared_nonfinite |= is_shared(reduction)

    def judge(self, round_: Round, *, in_backward: bool, scaler_skips: bool) -> Guarded:
        """The decision for the step that closes ``round_``; it holds until ``backward_begins``."""
        self.decision = Guarded.NO
        if not self.acts or scaler_skips:
            return self.decision
        if not (round_.shared_nonfinite or (round_.private and round_.gradient_nonfinite)):
            self._in_a_row = 0
        elif why := self._undecidable(round_, in_backward):
            self._say_undecided(why)
            self.decision = Guarded.UNDECIDED
        else:
            self.decision = self._act()
        return self.decision

    def _undecidable(self, round_: Round, in_backward: bool) -> str:
        if in_backward:
            return "the optimizer steps inside of backward"
        if round_.private:
            return "not every rank shares the results of these reductions"
        return "" if self._everyone_guards() else "not every rank has a guard"

    def _act(self) -> Guarded:
        self._in_a_row += 1
        self._in_all += 1
        over = self._in_a_row > self._budget.consecutive or self._in_all > self._budget.total
        return Guarded.HALTED if self._policy == HALT or over else Guarded.SKIPPED

    def _say_undecided(self, why: str) -> None:
        self._health.drops["guard_undecided"] += 1
        if why not in self._said:
            self._said.add(why)
            say(f"sentinel: the guard only observes here, the step is made: {why}")

    def backward_begins(self) -> None:
        """New gradients come: what was decided of the last ones is over."""
        self.decision = Guarded.NO


def is_shared(reduction: Reduction) -> bool:
    """Do all ranks get this result, or hear of it from those that do?"""
    return reduction.sharded or (not reduction.ranks and reduction.op.startswith("allreduce"))
