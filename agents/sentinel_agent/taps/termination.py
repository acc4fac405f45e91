"""Tap on SIGTERM: the open round is closed and told before the process ends as it would have.

Owns a handler, installed only where the signal still has its default action. The main thread may be blocked inside a collective,
where no Python handler runs; then the watching thread, woken through the wakeup descriptor, ends the process after
``PATIENCE_SECONDS``, so that it never lives longer for our sake.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

from sentinel_agent.errors import Health

PATIENCE_SECONDS = 0.5


class Termination:
    """Calls ``on_terminate(note)`` once, then lets SIGTERM do what it does by default."""

    def __init__(self, on_terminate: Callable[[str], None], health: Health) -> None:
        self._tell = health.guarded("terminate", on_terminate)
        self._told = threading.Event()
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def install(self) -> None:
        """Install handler and watcher, if this is the main thread and nobody else handles SIGTERM or has a wakeup descriptor."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        ):
            return
        reading, writing = socket.socketpair()
        for end in (reading, writing):
            end.setblocking(False)
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            reading.close()
            writing.close()
            return
        self._ends = (reading, writing)
        signal.signal(signal.SIGTERM, self._handle)
        threading.Thread(target=self._watch, name="sentinel-sigterm", daemon=True).start()

    def uninstall(self) -> None:
        """Give SIGTERM its default action back, if it is still ours."""
        if self._ends is None or threading.current_thread() is not threading.main_thread():
            return
        if self._is_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (now := signal.set_wakeup_fd(-1)) not in (-1, self._ends[1].fileno()):
            signal.set_wakeup_fd(now)
        self._told.set()
        for end in self._ends:
            end.close()
        self._ends = None

    def _is_ours(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._end("SIGTERM")

    def _end(self, note: str) -> None:
        if not self._told.is_set():
            self._told.set()
            self._tell(note)
        _by_default()

    def _watch(self) -> None:
        ends = self._ends
        while ends is not None and not self._told.is_set():
            with contextlib.suppress(OSError, ValueError):
                select.select([ends[0]], [], [], 1.0)
                if signal.SIGTERM in ends[0].recv(64) and self._is_ours() and not self._told.wait(PATIENCE_SECONDS):
                    self._end("SIGTERM, while blocked outside of Python")


def _by_default() -> None:
    """End this process by SIGTERM's default action. From any thread, so through the C library."""
    ctypes.CDLL(None).signal(signal.SIGTERM, None)
    os.kill(os.getpid(), signal.SIGTERM)
