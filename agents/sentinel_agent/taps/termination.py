"""Tap on SIGTERM: the open round is closed and told before the process ends as it would have.

Owns a handler, installed only where the signal still has its default action. The main thread may be blocked inside a collective,
where no Python handler runs; then the watching thread, woken through the wakeup descriptor, ends the process after
``PATIENCE_SECONDS``, so that it never lives longer for our sake. The one exception is a part that is being written: a launcher
ends all ranks when one dies, and half a part is none, so what is ``held`` may be finished within ``HELD_SECONDS``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from sentinel_agent.errors import Health

PATIENCE_SECONDS = 0.5
HELD_SECONDS = 10.0  # torchrun waits 30 before it kills


class Termination:
    """Calls ``on_terminate(note)`` once, then lets SIGTERM do what it does by default."""

    def __init__(self, on_terminate: Callable[[str], None], health: Health) -> None:
        self._tell = health.guarded("terminate", on_terminate)
        self._told = threading.Event()
        self._held = 0
        self._came = False  # while something was held
        self._released = threading.Condition()
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

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let what is done inside be finished before SIGTERM, should it come meanwhile, ends the process. Any thread may hold."""
        with self._released:
            self._held += 1
        try:
            yield
        finally:
            with self._released:
                self._held -= 1
                # What is told at the end may itself write a part: then the end is under way already.
                ends = self._came and not self._held and not self._told.is_set()
                self._released.notify_all()
            if ends:
                self._end("SIGTERM")

    def _is_ours(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        # Between two steps of whatever the main thread does: of a part that it is writing, or of the very lock.
        self._came = True
        if not self._held:
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
                    if self._held_up() and self._told.wait(PATIENCE_SECONDS):
                        return  # the thread that held it ends the process
                    self._end("SIGTERM, while blocked outside of Python")

    def _held_up(self) -> bool:
        """Wait until nothing is held any more, ``HELD_SECONDS`` at most. False if nothing was."""
        with self._released:
            self._came = True
            was = bool(self._held)
            self._released.wait_for(lambda: not self._held, HELD_SECONDS)
            return was


def _by_default() -> None:
    """End this process by SIGTERM's default action. From any thread, so through the C library."""
    ctypes.CDLL(None).signal(signal.SIGTERM, None)
    os.kill(os.getpid(), signal.SIGTERM)
