"""When Prometheus was last here and what it saw, so that a run that dies of its fault is still told.

Owns that memory and the wait for one last scrape. Without a scraper nothing is waited for.
"""

from __future__ import annotations

import threading
import time

SCRAPER_GONE_SECONDS = 180.0  # a scraper that has not come for this long is not waited for
MAX_WAIT_SECONDS = 20.0
SLACK = 1.3  # scrapes do not come by the clock


class Scrapes:
    """Scrapes of one coordinator; noted on the pages' threads, waited for on the one that stops the coordinator."""

    def __init__(self) -> None:
        self._came = threading.Condition()
        self._last_at: float | None = None
        self._told_at: float | None = None
        self._interval = MAX_WAIT_SECONDS
        self._seen = 0  # incidents in the last scrape

    def expect(self, now: float) -> None:
        """A scraper was told of this coordinator: its first scrape is due as any later one. ``now`` is monotonic."""
        self._told_at = now

    def note(self, incidents: int, now: float) -> None:
        """A scrape was answered, with this many incidents in it. ``now`` is monotonic."""
        with self._came:
            if self._last_at is not None and now > self._last_at:
                self._interval = now - self._last_at
            self._last_at, self._seen = now, incidents
            self._came.notify_all()

    def wait_for_one_with(self, incidents: int) -> bool:
        """Wait for a scrape with this many incidents, if one is due: True once there was one, False if none is to be expected."""
        with self._came:
            last = self._told_at if self._last_at is None else self._last_at
            if last is None or time.monotonic() - last > SCRAPER_GONE_SECONDS:
                return False
            timeout = min(SLACK * self._interval, MAX_WAIT_SECONDS)
            return self._came.wait_for(lambda: self._seen >= incidents, timeout)
