"""Which ranks have stopped: said nothing for long, or raised and left, while the others are still there.

Owns rule 19. An agent whose rank closes no rounds still says that it is alive (``Alive``), from a thread of its own: what is silent
is a process, its host or its network, and not a long step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sentinel.incidents.describe import plural, rank_list
from sentinel.incidents.finding import Finding, attribution_of
from sentinel.incidents.model import Cause, Kind, Severity, Stage, Verdict
from sentinel.incidents.roster import RankCondition, RankState, Roster

SILENT_SECONDS = 120.0
"""Twelve signs of life that did not come. A step in native code that never lets Python's other threads run may last a while."""
HEARD_SECONDS = 30.0
"""A rank that was heard within this time is there."""


@dataclass(slots=True)
class Silence:
    """What was told of one attempt."""

    told: set[int] = field(default_factory=set)

    def look(self, roster: Roster, now: float) -> Finding | None:
        """Ranks that stopped since the last look, if at least as many others are there."""
        quiet = {rank: state for rank, state in roster.ranks.items() if _has_stopped(state, roster, now)}
        self.told &= quiet.keys()  # who speaks again may fall silent again
        newly = tuple(sorted(quiet.keys() - self.told))
        there = [state for state in roster.ranks.values() if _is_there(state, now)]
        if not newly or len(quiet) > len(there):
            return None
        self.told |= quiet.keys()
        last = _last_shared([quiet[rank] for rank in newly], there, now)
        verdict = Verdict(
            rule="rank_silent",
            kind=Kind.RANK_SILENT,
            stage=Stage.NONE,
            attribution=attribution_of(newly, tuple(roster.ranks)),
            suspect_ranks=newly,
            severity=Severity.WARNING,
            cause=Cause.UNKNOWN,
            reason=_reason({rank: quiet[rank] for rank in newly}, len(there)),
        )
        return Finding(verdict, last.last_round + 1, last.step + 1)


def _has_stopped(state: RankState, roster: Roster, now: float) -> bool:
    if now - max(state.last_seen, roster.listening_since) <= SILENT_SECONDS:
        return False
    return state.raised or state.state in (RankCondition.RUNNING, RankCondition.SILENT)


def _is_there(state: RankState, now: float) -> bool:
    return state.state is RankCondition.RUNNING and now - state.last_seen <= HEARD_SECONDS


def _last_shared(stopped: list[RankState], there: list[RankState], now: float) -> RankState:
    """Who shows the last round that the stopped ranks took part in.

    A rank that is stopped may not have sent its last rounds. If the others close no more rounds they wait for it, so it was in
    all of theirs; if they go on without it, only its own word says how far it came.
    """
    wait = all(now - state.advanced_at > HEARD_SECONDS for state in there)
    return max([*stopped, *(there if wait else [])], key=lambda state: state.last_round)


def _reason(stopped: dict[int, RankState], there: int) -> str:
    ranks, others = sorted(stopped), f"{plural(there, 'other rank')} {'is' if there == 1 else 'are'} still there"
    if all(state.raised for state in stopped.values()):
        return f"{rank_list(ranks)} raised and left {SILENT_SECONDS / 60:.0f} minutes ago, while {others} and may wait for ever"
    return (
        f"nothing was heard of {rank_list(ranks)} for {SILENT_SECONDS / 60:.0f} minutes, not even from the agent's own thread, "
        f"while {others}: the process is stopped, or its host or network is gone"
    )
