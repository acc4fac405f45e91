"""Which samples of the batch are to blame: the smallest set of indices that still fails.

Owns the search. Samples are replaced, never left out, so that shapes and labels keep fitting; every question is one trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

Fails = Callable[[tuple[int, ...], int], bool | None]
"""``fails(replaced, by)``: is the step still nonfinite with these samples replaced by sample ``by``? None: it did not run."""
MAX_QUESTIONS: Final = 14
_GOOD_CANDIDATES: Final = 3


@dataclass(frozen=True, slots=True)
class Blamed:
    """Samples, and whether replacing them makes the step finite (None: not put to the test)."""

    samples: tuple[int, ...] = ()
    confirmed: bool | None = None


def confirm(rows: tuple[int, ...], size: int, fails: Fails) -> Blamed:
    """Rows of the first bad op are a free first answer: put it to the test, once with and once without them."""
    good = next((row for row in range(size) if row not in rows), None)
    if good is None:
        return Blamed()
    without = fails(rows, good)
    if without is None:
        return Blamed(rows, None)
    return Blamed(rows, not without)


def bisect(size: int, fails: Fails) -> Blamed:
    """Search without a first answer: find a good sample, then halve what fails. Gives up after a few questions."""
    counted = _Counted(fails)
    everything = tuple(range(size))
    good = next((row for row in _candidates(size) if counted(everything, row) is False), None)
    if good is None:
        return Blamed()
    found = _narrow(everything, everything, good, counted)
    return Blamed(found, True) if found and len(found) < size else Blamed()


def _narrow(suspects: tuple[int, ...], everything: Sequence[int], good: int, fails: _Counted) -> tuple[int, ...]:
    """Smallest parts of ``suspects`` that fail with all other samples replaced; all of them if neither half fails alone."""
    if len(suspects) == 1 or fails.spent:
        return suspects
    middle = len(suspects) // 2
    found: tuple[int, ...] = ()
    for half in (suspects[:middle], suspects[middle:]):
        kept = set(half)
        if fails(tuple(row for row in everything if row not in kept), good):
            found += _narrow(half, everything, good, fails)
    return found or suspects


def _candidates(size: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys((0, size - 1, size // 2)))[:_GOOD_CANDIDATES]


class _Counted:
    """Counts questions, since each costs a run of the script."""

    def __init__(self, fails: Fails) -> None:
        self._fails = fails
        self._left = MAX_QUESTIONS

    @property
    def spent(self) -> bool:
        """True if no more may be asked."""
        return self._left <= 0

    def __call__(self, replaced: tuple[int, ...], by: int) -> bool | None:
        if self.spent:
            return None
        self._left -= 1
        return self._fails(replaced, by)
