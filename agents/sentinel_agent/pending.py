"""Checks of results that have not arrived yet, and the points where they must be finished.

Owns the wait for collectives. Nobody may write a gradient while a check still reads it: checks of DDP's buckets are joined at
the end of backward (an engine callback queued at the first bucket, so it runs before DDP copies anything), the others before
the user's own ``wait`` returns.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from sentinel_agent.buckets import Bucket
from sentinel_agent.errors import Health
from sentinel_agent.rounds import Reduction

JOIN_SECONDS = 5.0
"""A callback that has not run this long after its collective completed is given up, and counted."""


class Pending:
    """Reductions whose result is still to be checked. ``finish(reduction)`` looks at the result; ``before_join()`` comes first.

    Of a bucket, ``look(bucket)`` reads the result as it arrives and ``finish`` only books it, when all of a join have been read.
    """

    def __init__(
        self,
        finish: Callable[[Any], None],
        health: Health,
        before_join: Callable[[], None] = lambda: None,
        look: Callable[[Bucket], None] = lambda _bucket: None,
    ) -> None:
        self._finish = finish
        self._look = look
        self._before_join = before_join
        self._health = health
        self._waiting: deque[tuple[Reduction | Bucket, threading.Event | None]] = deque()
        self._queued_for: int | None = None
        self._lock = threading.Lock()

    def now(self, reduction: Reduction) -> None:
        """The caller waits for this collective at once, so wait and look now (waiting twice is harmless)."""
        if self._wait(reduction.work):
            self._finish(reduction)

    def at_end_of_backward(self, reduction: Reduction | Bucket) -> None:
        """Look when backward ends, on the thread that runs it, before any of the gradients can be written."""
        self._waiting.append((reduction, None))
        task = torch._C._current_graph_task_id()
        if self._queued_for != task:
            self._queued_for = task
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._health.guarded("join", self.join))

    def when_complete(self, reduction: Reduction) -> None:
        """Look from the collective's own completion callback, which runs before the user's ``Work.wait`` returns."""
        try:
            future = reduction.work.get_future()
        except RuntimeError:  # gloo's reduce_scatter has no future: look at the next join
            self._waiting.append((reduction, None))
            return
        done = threading.Event()
        self.forget_done()
        self._waiting.append((reduction, done))
        look = self._health.guarded("completion", self._finish)

        def completed(future: Any) -> None:
            try:
                if _succeeded(future):
                    look(reduction)
            finally:
                done.set()

        future.add_done_callback(completed)

    def join(self) -> None:
        """Finish every outstanding check."""
        self._before_join()
        looked: list[Bucket] = []
        try:
            while (taken := self._next()) is not None:
                waiting, done = taken
                if type(waiting) is not Bucket:
                    self._book(looked)  # in the order they came
                if not self._wait(waiting.work):
                    continue
                if type(waiting) is Bucket:
                    self._look(waiting)
                    looked.append(waiting)
                elif done is None:
                    self._finish(waiting)
                elif not done.wait(JOIN_SECONDS):
                    self._health.drops["check_not_finished"] += 1
        finally:
            self._book(looked)

    def _next(self) -> tuple[Reduction | Bucket, threading.Event | None] | None:
        """The oldest outstanding check, which is the caller's from now on."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _book(self, looked: list[Bucket]) -> None:
        """Between two large reads our own code is in no cache: what was read is booked in one go."""
        while looked:
            self._finish(looked.pop(0))

    def under_way(self) -> list[Reduction]:
        """Gradients that a loop has given away and that are not back yet. Host memory only: elsewhere, order is the stream's."""
        given = [one for one, done in tuple(self._waiting) if type(one) is Reduction and done is not None]
        return [one for one in given if one.given_away and not _is_done(one.work)]

    def forget_done(self) -> None:
        """Drop finished entries at the head, so that async collectives outside of a round do not pile up."""
        while self._waiting and self._waiting[0][1] is not None and self._waiting[0][1].is_set():
            self._waiting.popleft()

    def _wait(self, work: Any) -> bool:
        """Wait for a collective; False if it failed, which its caller will hear from torch."""
        if work is None:
            return True
        try:
            if not work.is_completed():
                self._health.stopwatch.uncounted(work.wait)
            else:
                work.wait()  # it may have failed
        except RuntimeError:
            self._health.drops["collective_failed"] += 1
            return False
        return True


def written_since(reduction: Reduction) -> bool:
    """Has anybody but the collective written its outputs since it was issued? False where that is not known."""
    versions = zip(reduction.outputs, reduction.versions, strict=False)
    return any(tensor._version != version for tensor, version in versions)


def _is_done(work: Any) -> bool:
    try:
        return work is None or bool(work.is_completed()) or bool(work.get_future().done())
    except RuntimeError:  # it failed: its user will hear
        return True


def _succeeded(future: Any) -> bool:
    try:
        future.value()
    except RuntimeError:
        return False
    return True
