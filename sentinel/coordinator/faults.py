"""Errors of the coordinator's own, counted under a named reason, so that one message never ends the loop.

Owns the server's only broad ``except``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import ParamSpec, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Fault(StrEnum):
    """Where the coordinator failed; label values of ``sentinel_coordinator_faults_total``."""

    MESSAGE = "message"  # taking in one message
    CORE = "core"  # the tracker, on one event
    TICK = "tick"
    SNAPSHOT = "snapshot"  # answering metrics and pages
    COMMAND = "command"  # doing what the core asked
    COMMIT = "commit"  # writing a bundle's manifest
    FETCH = "fetch"  # taking in a part from another host
    RESTORE = "restore"  # reading a run back at start
    PAGE = "page"  # answering a request
    STORE_WRITE = "store_write"  # the disk did not take a commit (it is tried again)
    STORE_ROW = "store_row"  # a row that can never be stored


class Faults:
    """Counts by ``Fault``; each reason is counted on one thread only."""

    def __init__(self) -> None:
        self.counts: Counter[Fault] = Counter()

    def count(self, fault: Fault) -> None:
        """Count a fault that was caught elsewhere."""
        self.counts[fault] += 1

    def guard(self, fault: Fault, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Result of ``act``, or None after an exception that was counted and logged."""
        try:
            return act(*args, **kwargs)
        except Exception as error:
            # By design the one place where anything may be caught: a fault of ours must cost one message, not the run.
            self.counts[fault] += 1
            log.error("coordinator fault (%s): %s: %s", fault, type(error).__name__, error)
            log.debug("where it came from", exc_info=True)
            return None
