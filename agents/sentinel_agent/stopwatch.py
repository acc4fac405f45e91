"""The agent's own time inside the training threads, for benchmarks: off in normal runs, where it costs nothing.

Owns the sum. Processor time of the calling thread is counted, so that waiting for a core that somebody else has is not; nor is
what it costs to fall asleep until a collective is done, which its caller would do next.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _Thread(threading.local):
    inside = False
    elsewhere = 0.0


class Stopwatch:
    """``seconds`` is the processor time spent inside timed functions, on all threads."""

    def __init__(self, *, running: bool) -> None:
        self.running = running
        self.seconds = 0.0
        self._thread = _Thread()
        self._lock = threading.Lock()

    def timed(self, function: Callable[P, R]) -> Callable[P, R]:
        """``function`` with its time added up, outermost call only; ``function`` itself if the watch does not run."""
        if not self.running:
            return function

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            here = self._thread
            if here.inside:
                return function(*args, **kwargs)
            here.inside, here.elsewhere = True, 0.0
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - began - here.elsewhere
                here.inside = False
                with self._lock:
                    self.seconds += took

        return call

    def uncounted(self, function: Callable[[], R]) -> R:
        """``function()``, not counted: what the training does in any case, and only happens to do here."""
        if not self.running:
            return function()
        began = time.thread_time()
        try:
            return function()
        finally:
            self._thread.elsewhere += time.thread_time() - began
