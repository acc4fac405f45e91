"""The agent's own time inside the training threads, for benchmarks: off in normal runs, where it costs nothing.

Owns the sum. Processor time of the calling thread is counted, so that waiting for collectives, and for a core that somebody else
has, is not.
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
    depth = 0


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
            outermost, here.depth = here.depth == 0, here.depth + 1
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                here.depth -= 1
                if outermost:
                    with self._lock:
                        self.seconds += time.thread_time() - began

        return call
