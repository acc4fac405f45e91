"""Browsers that have shown the token: a cookie in place of the Authorization header that no browser sends by itself.

Owns sign-in and its cookies. Who needs one at all is decided in ``access.py``.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

COOKIE = "sentinel_session"
LIFETIME_SECONDS = 12 * 3600
MAX_SESSIONS = 256
MAX_FORM_BYTES = 4096


class Sessions:
    """Sessions by their secret name. Any thread may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[str, float] = {}
        self._lock = threading.Lock()

    def open(self) -> str:
        """A new session's name; the oldest one ends if there are too many."""
        name = secrets.token_urlsafe(32)
        with self._lock:
            self._drop_ended()
            while len(self._ends) >= MAX_SESSIONS:
                del self._ends[next(iter(self._ends))]
            self._ends[name] = self._clock() + LIFETIME_SECONDS
        return name

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return isinstance(name, str) and self._ends.get(name, 0.0) > self._clock()

    def _drop_ended(self) -> None:
        now = self._clock()
        self._ends = {name: end for name, end in self._ends.items() if end > now}


def cookie_header(name: str, secure: bool) -> str:
    """The Set-Cookie value: for this site only, never for scripts."""
    return f"{COOKIE}={name}; Path=/; Max-Age={LIFETIME_SECONDS}; HttpOnly; SameSite=Strict" + (
        "; Secure" if secure else ""
    )
