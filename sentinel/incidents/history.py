"""What a run's earlier rounds said, as far as finite failures need it: groups, equal weights, rows of odd rounds.

Owns the memory between rounds of one attempt. The comparisons that use it are ``comparisons.py``'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sentinel.incidents.window import RoundWindow
from sentinel.wire.messages import UNREDUCED, RoundClosed

LOSSES = 32
GROWTH = 1e3
"""Growth of the loss within ``LOSSES`` rounds that healthy training does not show."""


@dataclass(slots=True)
class Streak:
    """Consecutive rounds in which something held: where it began and how long it has lasted."""

    round: int = 0
    step: int = 0
    length: int = 0
    told: bool = False
    ranks: tuple[int, ...] = ()
    last: int = -1  # the round before this one, if it goes on: rounds with evidence may be judged ahead of healthy ones

    def goes_on(self, closed: RoundClosed, ranks: tuple[int, ...]) -> None:
        """It held in this round too, on these ranks."""
        if self.length == 0 or closed.round != self.last + 1:
            self.round, self.step, self.length, self.told = closed.round, closed.step, 0, False
        self.last = closed.round
        self.length += 1
        self.ranks = ranks

    def ends(self) -> None:
        """It did not hold in this round."""
        self.length = 0
        self.told = False


@dataclass(frozen=True, slots=True)
class Drift:
    """Replicas that were equal at the start of round ``equal_at`` and differ at the start of ``differ_at``."""

    group: str
    equal_at: int
    equal_step: int
    differ_at: int
    differ_step: int
    ranks: tuple[int, ...]
    suspects: tuple[int, ...]
    unreduced: tuple[str, ...]
    unreduced_total: int


@dataclass(slots=True)
class History:
    """Memory of one attempt. ``equal`` maps a group of weights to the last round (and step) at whose start all were equal."""

    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    equal: dict[str, tuple[int, int]] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    bad_groups: set[str] = field(default_factory=set)  # whose reductions were found wrong: their weights differ for it
    drift: Drift | None = None
    together_since: int | None = None  # the first round in which something showed that weights are meant to be equal
    averages: bool = False  # weights that had drifted apart were equal again
    unreduced: dict[int, RoundClosed] = field(default_factory=dict)
    zero_gradients: Streak = field(default_factory=Streak)
    skips: Streak = field(default_factory=Streak)
    first_weights: dict[tuple[str, int], int] = field(default_factory=dict)  # by group and rank, as first seen
    moved: bool = False  # some weights are no longer those of the first look
    applied: int = 0  # steps that were made with gradients that are not zero
    in_vain: int = 0  # of those, how many there were at the last look at weights that had not moved
    in_vain_ranks: tuple[int, ...] = ()
    sees_activations: bool = False
    losses: dict[int, float] = field(default_factory=dict)

    def note_loss(self, closed: RoundClosed) -> None:
        """Remember the largest finite loss magnitude of each of the last rounds, in whatever order they are told."""
        if closed.loss is None or not math.isfinite(closed.loss):
            return
        self.losses[closed.round] = max(abs(closed.loss), self.losses.get(closed.round, 0.0))
        if len(self.losses) > 2 * LOSSES:
            del self.losses[min(self.losses)]

    def losses_grew(self, before: int) -> bool:
        """The last finite loss before a round was a thousand times the smallest of the rounds before that."""
        seen = [self.losses[number] for number in sorted(self.losses) if number < before][-LOSSES:]
        return len(seen) >= 3 and seen[-1] > GROWTH * max(min(seen), 1e-6)

    def learn_groups(self, window: RoundWindow) -> None:
        """Remember whose ranks a group's are; they are sent once."""
        for closed in window.closed.values():
            self.sees_activations = self.sees_activations or closed.activations > 0
            for sync in closed.sync:
                if sync.ranks and sync.group not in self.groups:
                    self.groups[sync.group] = sync.ranks
            if self.together_since is None and _means_to_be_equal(closed):
                self.together_since = closed.round


def _means_to_be_equal(closed: RoundClosed) -> bool:
    """A wrapper keeps this rank's weights equal to others', or something has reduced gradients over several ranks."""
    wrapped = any(weights.group != UNREDUCED for weights in closed.weights)
    return wrapped or any(sync.collectives and sync.size > 1 for sync in closed.sync)
