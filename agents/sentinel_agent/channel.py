"""The way out of a training process: reports go into a deque, a thread of its own talks to the node's relay.

Owns the socket, its thread and the bounded queues. ``send`` never blocks and never raises; what does not fit is dropped and counted
under a named reason. Commands come back on the same socket, are verified, and handed to ``on_command`` on this thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from sentinel.wire.codec import MAX_BATCH, FrameRefused, decode_command, encode_reports
from sentinel.wire.messages import Alive, Command, Counted, Goodbye, Released, Report, is_critical
from sentinel_agent.errors import Health, one_line

MAX_SAMPLES = 1024  # healthy rounds waiting for the thread; the newest win
MAX_CRITICAL = 16384  # evidence waiting for the thread
MAX_HANDED = 1024  # reports that the thread has not sorted: from there on, whoever sends does
POLL_MILLISECONDS = 10
COUNTED_EVERY_SECONDS = 5.0
ALIVE_EVERY_SECONDS = 10.0
"""A rank that has nothing to say for this long says that it is there; the coordinator misses it after twelve of them."""
LINGER_MILLISECONDS = 500
BATCH = min(64, MAX_BATCH)  # keeps a frame of evidence well under the wire's limit


class Channel:
    """One rank's connection to its relay (``address`` is ipc://)."""

    def __init__(
        self,
        address: str,
        *,
        identity: tuple[int, int, int],
        key: bytes,
        health: Health,
        on_command: Callable[[Command], None],
        alive_seconds: float = ALIVE_EVERY_SECONDS,
    ) -> None:
        self._address = address
        self._attempt, self._rank, self._node = identity
        self._key = key
        self._health = health
        self._on_command = on_command
        self._handed: deque[Report] = deque()  # whether it is critical, the channel's thread finds out
        self._sorting = threading.RLock()  # a signal handler may send while this thread sorts
        self._samples: deque[Report] = deque(maxlen=MAX_SAMPLES)
        self._critical: deque[Report] = deque(maxlen=MAX_CRITICAL)
        self._alive_seconds = alive_seconds
        self._sent_at = time.monotonic()
        self._stop = threading.Event()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sentinel-channel", daemon=True)

    def start(self) -> None:
        """Connect and begin to send."""
        self._thread.start()

    def send(self, report: Report) -> None:
        """Queue a report. Called from the training thread: an append's worth of time, whatever the network does."""
        self._handed.append(report)
        if len(self._handed) >= MAX_HANDED:
            self._sort()

    def _sort(self) -> None:
        """Put what was handed over where it waits; a full queue loses its oldest report. The channel's thread does, while awake."""
        with self._sorting:
            while self._handed:
                try:
                    report = self._handed.popleft()
                except IndexError:  # a signal handler has just sorted the rest
                    return
                queue = self._critical if is_critical(report) else self._samples
                if len(queue) == queue.maxlen:
                    self._health.drops["channel_full"] += 1
                queue.append(report)

    def goodbye(self, report: Goodbye, timeout: float) -> bool:
        """Say goodbye, wait up to ``timeout`` seconds to be released, and close. True if released in time."""
        self.send(report)
        released = self._thread.is_alive() and self._released.wait(timeout)
        self.close()
        return released

    def close(self) -> None:
        """Send what is queued and end the thread; at most about a second."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def forget(self) -> None:
        """In a forked child: the socket and its thread belong to the parent."""
        self._sorting = threading.RLock()  # the parent's thread may have held it
        for queue in (self._handed, self._samples, self._critical):
            queue.clear()

    def _run(self) -> None:
        try:
            self._talk()
        except Exception as error:  # noqa: BLE001 - the channel's thread must end in a count, not in a traceback
            self._health.fault("channel", error)
            self._health.disable(f"its channel died: {one_line(error)}")

    def _talk(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        socket.setsockopt(zmq.SNDHWM, MAX_SAMPLES)
        socket.setsockopt(zmq.IDENTITY, f"rank-{self._attempt}-{self._rank}-{os.getpid()}".encode())
        socket.connect(self._address)
        try:
            counted_at = time.monotonic()
            while not self._stop.is_set():
                if socket.poll(POLL_MILLISECONDS):
                    self._receive(socket)
                self._flush(socket)
                if time.monotonic() - counted_at > COUNTED_EVERY_SECONDS:
                    counted_at = time.monotonic()
                    self._count()
                if time.monotonic() - self._sent_at > self._alive_seconds:
                    self._sent_at = time.monotonic()
                    self._samples.append(Alive(self._attempt, self._rank))
            self._count()
            self._flush(socket)
        finally:
            socket.close()
            context.term()

    def _count(self) -> None:
        if self._health.drops or self._health.faults:
            drops, faults = dict(self._health.drops), dict(self._health.faults)
            self._samples.append(Counted(self._attempt, self._rank, self._node, drops, faults))

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        """Send what waits, evidence first. A full socket keeps evidence here and drops samples."""
        self._sort()
        for queue in (self._critical, self._samples):
            while queue:
                batch = [queue.popleft() for _ in range(min(BATCH, len(queue)))]
                try:
                    socket.send(encode_reports(batch), zmq.NOBLOCK)
                    self._sent_at = time.monotonic()
                except TypeError as error:  # a field of a type the wire does not know: lose this batch, not the channel
                    self._health.fault("encode", error)
                except zmq.Again:
                    if queue is self._critical:
                        queue.extendleft(reversed(batch))
                    else:
                        self._health.drops["relay_full"] += len(batch)
                    return

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        frame = socket.recv(zmq.NOBLOCK)
        try:
            command = decode_command(frame, self._key, time.time())
        except FrameRefused as refused:
            self._health.drops[f"command_{refused.reason}"] += 1
            return
        if isinstance(command, Released):
            self._released.set()
        self._on_command(command)
