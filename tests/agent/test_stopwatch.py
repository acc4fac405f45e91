"""The agent's own time: what is counted and what is not."""

from __future__ import annotations

import time

from sentinel_agent.stopwatch import Stopwatch


def _burn(seconds: float) -> float:
    """Keep this thread's processor busy; returns the processor time it took."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass
    return time.thread_time() - began


def test_what_a_timed_function_calls_is_counted_once() -> None:
    """A timed function inside a timed function adds nothing of its own."""
    watch = Stopwatch(running=True)
    inner = watch.timed(_burn)
    began = time.thread_time()
    watch.timed(lambda: inner(0.02))()
    assert 0.02 <= watch.seconds <= time.thread_time() - began


def test_what_the_training_does_anyway_is_not_counted() -> None:
    """Time in ``uncounted`` is taken off, and comes back to nobody; the rest of the call is counted."""
    watch = Stopwatch(running=True)

    def call() -> None:
        _burn(0.02)
        watch.uncounted(lambda: _burn(0.2))

    watch.timed(call)()
    assert 0.02 <= watch.seconds < 0.2


def test_a_stopped_watch_leaves_functions_as_they_are() -> None:
    """In normal runs nothing is wrapped and nothing is counted."""
    watch = Stopwatch(running=False)
    assert watch.timed(_burn) is _burn
    watch.uncounted(lambda: _burn(0.001))
    assert watch.seconds == 0.0
