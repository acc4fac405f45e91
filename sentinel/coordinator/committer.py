"""A thread that commits bundles, so that hashing large files never holds up the loop.

Owns the queue and the thread. What a commit does is ``sentinel/bundle/commit.py``; what its result means is the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from sentinel.bundle.manifest import Manifest
from sentinel.coordinator.faults import Fault, Faults

Job = Callable[[], Manifest]
Done = Callable[[Manifest | None], None]
"""Told when a commit ended, on the committer's thread: the manifest, or None after a fault that was counted."""


class Committer:
    """One daemon thread: a disk that hangs must not keep the process from ending."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._jobs: SimpleQueue[tuple[Job, Done] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sentinel-commit", daemon=True)

    def start(self) -> None:
        """Begin to take jobs."""
        self._thread.start()

    def submit(self, job: Job, done: Done) -> None:
        """Queue ``job``."""
        self._jobs.put((job, done))

    def close(self) -> None:
        """Take no more jobs after those queued; does not wait."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (queued := self._jobs.get()) is not None:
            job, done = queued
            done(self._faults.guard(Fault.COMMIT, job))
