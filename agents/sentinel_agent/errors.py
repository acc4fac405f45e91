"""How a fault of our own is kept from the training job: caught at the tap, counted by name, and after too many, the agent is off.

Owns the counts of faults and drops of this process. This is one of the five kinds of place where everything is caught on purpose.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sentinel_agent.stopwatch import Stopwatch

P = ParamSpec("P")
R = TypeVar("R")

MAX_FAULTS = 5
"""An agent that has faulted this often at its taps switches itself off: a sixth look is unlikely to go better."""


def one_line(error: BaseException) -> str:
    """Type and first line of the text of ``error``, at most 180 characters, whatever its ``__str__`` does."""
    shown = traceback.format_exception_only(type(error), error)[-1]  # survives a __str__ that raises
    return shown.strip().partition("\n")[0][:180]


def say(text: str) -> None:
    """One line on stderr, if there is one: a closed or broken stderr must not reach the training."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)


class Health:
    """Is the agent on, and what went wrong in it so far. ``on_disable`` hears the reason once, when it switches off."""

    def __init__(self, rank: int, on_disable: Callable[[str], None], stopwatch: Stopwatch | None = None) -> None:
        self.active = True
        self.stopwatch = stopwatch or Stopwatch(running=False)
        self.faults: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()
        self._rank = rank
        self._on_disable = on_disable

    def fault(self, site: str, error: BaseException) -> None:
        """Count an exception caught at ``site``; the fifth disables the agent."""
        self.faults[f"{site}:{type(error).__name__}"] += 1
        if self.active and self.faults.total() >= MAX_FAULTS:
            self.disable(f"{self.faults.total()} faults, last at {site}: {one_line(error)}")

    def disable(self, reason: str) -> None:
        """Switch the agent off for good, loudly. Training goes on, unwatched on this rank."""
        if not self.active:
            return
        self.active = False
        say(f"sentinel: agent of rank {self._rank} switched itself off, training goes on unwatched: {reason}")
        self._on_disable(reason)

    def guarded(self, site: str, function: Callable[P, R], *, even_off: bool = False) -> Callable[P, R | None]:
        """``function``, but it does nothing once the agent is off (unless ``even_off``), and never raises."""
        function = self.stopwatch.timed(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if not (self.active or even_off):
                return None
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the host must never see a fault of ours
                self.fault(site, error)
                return None

        return call
