"""Signals once the job is over: the last words are not cut short by a signal that comes twice.

Owns the handlers from torchrun's end to the process's end. While the job runs, signals are torchrun's.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


def hold(names: str, exit_code: int) -> None:
    """From now on the first of these signals is only noted, and a second one leaves with ``exit_code``.

    ``names`` as in torchrun's --signals-to-handle. torchrun's own handlers would raise in the middle of the ending, and some
    supervisors signal a process both by its id and by its group.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if noted:
            raise SystemExit(exit_code)
        noted.append(number)

    for name in names.split(","):
        known = signal.Signals.__members__.get(name.strip())
        if known is not None and signal.getsignal(known) is not signal.SIG_IGN:
            signal.signal(known, note)
