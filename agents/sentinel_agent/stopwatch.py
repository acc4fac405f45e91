"""The agent's own time inside the training threads, for benchmarks: off in normal runs, where it costs nothing.

Owns the sum. Time spent waiting for collectives is the network's, not ours, and is taken out.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _Thread(threading.local):
    depth = 0
    waited = 0.0


class Stopwatch:
    """``seconds`` is the time spent inside timed functions, on all threads; ``waited`` what of it was waiting."""

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
            began = time.perf_counter()
            outermost, here.depth = here.depth == 0, here.depth + 1
            if outermost:
                here.waited = 0.0
            try:
                return function(*args, **kwargs)
            finally:
                here.depth -= 1
                if outermost:
                    with self._lock:
                        self.seconds += time.perf_counter() - began - here.waited

        return call

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the thread waits for somebody else."""
        if not self.running:
            yield
            return
        began = time.perf_counter()
        try:
            yield
        finally:
            self._thread.waited += time.perf_counter() - began
