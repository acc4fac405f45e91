"""Counts rounds as the agent's ledger does, so that a replay knows when the recorded one begins and ends.

Owns the count. The rule is the ledger's: a round closes at the step of an optimizer or a scaler, or, in hindsight, when
gradients are found cleared before the next backward.
"""

from __future__ import annotations

from collections.abc import Callable

from sentinel_agent.scan import Scan


class Clock:
    """``on_close(number, why)`` is called as a round closes, before the optimizer has stepped."""

    def __init__(self, scan: Scan, on_close: Callable[[int, str], None]) -> None:
        self.round = 0
        self._scan = scan
        self._on_close = on_close
        self._dirty = False
        self._ended = False

    def backward_begins(self) -> None:
        """Called before every backward."""
        if self._ended and self._dirty and self._scan.cleared():
            self._close("gradients were cleared without a step")
        self._dirty = True
        self._ended = False

    def backward_ended(self) -> None:
        """Called after every backward."""
        self._ended = True
        self._scan.remember_gradients()

    def stepped(self, why: str) -> None:
        """An optimizer or a scaler is about to step."""
        if self._dirty:
            self._close(why)

    def jump(self, round_: int) -> None:
        """The recorded round is entered at once, without those before it."""
        self.round = round_
        self._dirty = self._ended = False

    def _close(self, why: str) -> None:
        self._dirty = self._ended = False
        number, self.round = self.round, self.round + 1
        self._on_close(number, why)
