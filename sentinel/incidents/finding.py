"""A finding: a verdict that dates itself, and the small steps by which every rule of finite failures makes one.

Owns no rule. A streak or a drift begins before it is told, so the round and step of its origin are part of the finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from sentinel.incidents.model import Attribution, Cause, Kind, Severity, Stage, Verdict
from sentinel.incidents.window import RoundWindow


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict with the round and step of its origin."""

    verdict: Verdict
    round: int
    step: int


def minority(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Ranks that differ from a strict majority; all of them if there is none (two ranks have no majority)."""
    counted = Counter(values.values())
    (common, times), *_ = counted.most_common(1)
    if times * 2 <= len(values):
        return tuple(sorted(values))
    return tuple(sorted(rank for rank, value in values.items() if value != common))


def attribution_of(ranks: tuple[int, ...], group: tuple[int, ...]) -> Attribution:
    """How ``ranks`` relate to the ``group`` they belong to."""
    if not ranks:
        return Attribution.NONE
    if len(ranks) == 1:
        return Attribution.RANK_LOCAL
    return Attribution.ALL_RANKS if set(ranks) >= set(group) else Attribution.MULTI_RANK


def finding(
    window: RoundWindow,
    rule: str,
    kind: Kind,
    stage: Stage,
    suspects: tuple[int, ...],
    group: tuple[int, ...],
    cause: Cause,
    reason: str,
    *,
    at: tuple[int, int] | None = None,
    severity: Severity = Severity.CRITICAL,
) -> Finding:
    """A finding about ``suspects`` of ``group`` in this round, or dated ``at`` (round, step)."""
    verdict = Verdict(
        rule=rule,
        kind=kind,
        stage=stage,
        attribution=attribution_of(suspects, group),
        suspect_ranks=suspects,
        severity=severity,
        cause=cause,
        reason=reason,
    )
    round_, step = at or (window.round, window.step(suspects))
    return Finding(verdict, round_, step)
