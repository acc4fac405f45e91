"""Totals of a run that metrics show.

Owns the sums, not their names outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sentinel.incidents.classify import Quiet
from sentinel.wire.messages import Counted


@dataclass(slots=True)
class TrackerCounts:
    """Totals for metrics. ``quiet`` counts rounds with evidence and no incident, by named reason."""

    reports: int = 0
    rounds_checked: int = 0
    unwatched: set[int] = field(default_factory=set)  # ranks whose agent switched itself off
    windows_given_up: int = 0
    quiet: Counter[str] = field(default_factory=Counter)
    guarded: Counter[str] = field(default_factory=Counter)  # rounds the guard had reason to act in, by what it did
    reported: dict[tuple[int, int], Counted] = field(default_factory=dict)

    @property
    def benign_skips(self) -> int:
        """Rounds that the GradScaler skipped as its search for a scale explains."""
        return self.quiet[Quiet.SCALER_SEARCH]

    def drops(self) -> Counter[str]:
        """What agents and relays dropped, by reason, over all of them."""
        return _summed(report.drops for report in self.reported.values())

    def faults(self) -> Counter[str]:
        """What agents and relays swallowed, by reason, over all of them."""
        return _summed(report.faults for report in self.reported.values())


def _summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counted in counts:
        for reason, count in counted.items():  # Counter.update costs ten times this, and there is one report per rank
            total[reason] += count
    return total
