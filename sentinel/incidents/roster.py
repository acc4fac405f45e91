"""Which ranks a run has and how each is doing.

Owns rank states only; rounds are joined in ``window.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from sentinel.wire.messages import (
    Alive,
    Counted,
    Disabled,
    Evidence,
    Goodbye,
    Hello,
    NodeEnded,
    PartWritten,
    Report,
    RoundClosed,
)

SILENT_AFTER_SECONDS = 60.0
STALL_SECONDS = 5.0
"""Ticks come ten times a second: after a longer pause it was the coordinator that did not listen."""


class RankCondition(StrEnum):
    """``silent``: no report for a minute while running. ``ended``: said goodbye, or its node's processes are gone."""

    RUNNING = "running"
    SILENT = "silent"
    DISABLED = "disabled"
    ENDED = "ended"


@dataclass(slots=True)
class RankState:
    """What is known of one rank in the newest attempt."""

    rank: int
    attempt: int
    node: int = -1
    state: RankCondition = RankCondition.RUNNING
    last_seen: float = 0.0
    last_round: int = -1
    step: int = -1
    advanced_at: float = 0.0  # when it was heard to have closed that round
    left_at_round: int | None = None  # last round it closed before it ended or was disabled
    said_goodbye: bool = False  # it is known to take no part in later rounds
    raised: bool = False  # its goodbye said that it ended by an exception or a signal


@dataclass(slots=True)
class Roster:
    """Ranks by number. ``world_size`` grows with what launchers and ranks say, and follows a new attempt's."""

    world_size: int = 0
    attempt: int = 0
    ranks: dict[int, RankState] = field(default_factory=dict)
    listening_since: float = 0.0  # unix seconds; what was said before may not have been heard yet
    _ticked: float = 0.0
    _left: int = 0  # ranks that have left; counted, so that a report costs the same whatever the world size

    def note(self, report: Report, now: float) -> None:
        """Take in whom a report comes from, and what it says about that rank's state."""
        if isinstance(report, NodeEnded):
            self._node_ended(report)
            return
        if report.rank < 0 or report.attempt < self.attempt:
            return
        if report.attempt > self.attempt:
            self._new_attempt(report.attempt)
        if isinstance(report, Hello):
            self.world_size = max(report.world_size, 1)
        state = self.ranks.setdefault(report.rank, RankState(report.rank, report.attempt))
        state.last_seen = now
        self._apply(state, report)

    def _apply(self, state: RankState, report: Report) -> None:
        match report:
            case Hello():
                state.node = report.node
            case RoundClosed() if report.round >= state.last_round:
                state.last_round, state.step, state.advanced_at = report.round, report.step, state.last_seen
            case Disabled():
                state.state = RankCondition.DISABLED
                self._leaves(state, state.last_round)
            case Goodbye():
                state.said_goodbye, state.raised = True, not report.clean
                if state.state is not RankCondition.DISABLED:
                    state.state = RankCondition.ENDED
                self._leaves(state, max(report.last_round, state.last_round))
            case RoundClosed() | Evidence() | PartWritten() | Counted() | Alive() | NodeEnded():
                pass
        if state.state is RankCondition.SILENT:
            state.state = RankCondition.RUNNING

    def _new_attempt(self, attempt: int) -> None:
        self.attempt, self.ranks, self._left = attempt, {}, 0

    def _node_ended(self, report: NodeEnded) -> None:
        for state in self.ranks.values():
            if state.node == report.node and state.attempt <= report.attempt:
                state.state = RankCondition.ENDED
                self._leaves(state, state.last_round)

    def _leaves(self, state: RankState, round_: int) -> None:
        if state.left_at_round is None:
            state.left_at_round = round_
            self._left += 1

    def tick(self, now: float) -> None:
        """Mark running ranks that have said nothing for ``SILENT_AFTER_SECONDS``."""
        if now - self._ticked > STALL_SECONDS:
            self.listening_since = now
        self._ticked = now
        for state in self.ranks.values():
            heard = max(state.last_seen, self.listening_since)
            if state.state is RankCondition.RUNNING and now - heard > SILENT_AFTER_SECONDS:
                state.state = RankCondition.SILENT

    def end_all(self) -> None:
        """No rank will report again."""
        for state in self.ranks.values():
            state.state = RankCondition.ENDED
            self._leaves(state, state.last_round)

    def present(self) -> int:
        """How many ranks have not left; cheap, so that a window is looked at closely only when it may be complete."""
        return (self.world_size or len(self.ranks)) - self._left

    def expected(self, round_: int) -> list[int]:
        """Ranks that should close round ``round_``: all of the world but those that left before it."""
        everyone = range(self.world_size) if self.world_size else sorted(self.ranks)
        return [rank for rank in everyone if not self._left_before(rank, round_)]

    def concerned(self, round_: int) -> list[int]:
        """Ranks that may have taken part in round ``round_``: all but those that had said goodbye before it.

        A rank whose agent was disabled, or that was killed, may have been in it all the same; what it gave is not known.
        """
        everyone = range(self.world_size) if self.world_size else sorted(self.ranks)
        return [rank for rank in everyone if not self._gone_before(rank, round_)]

    def _left_before(self, rank: int, round_: int) -> bool:
        state = self.ranks.get(rank)
        return state is not None and state.left_at_round is not None and state.left_at_round < round_

    def _gone_before(self, rank: int, round_: int) -> bool:
        state = self.ranks.get(rank)
        return state is not None and state.said_goodbye and self._left_before(rank, round_)
