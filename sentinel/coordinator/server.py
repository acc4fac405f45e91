"""The ROUTER and its loop: one thread that polls, drains, feeds the runs and sends answers.

Owns the sockets, the thread and its clock. What a message means is decided in ``intake.py`` and below; everything another thread
has for this one comes in through ``post``.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import zmq

from sentinel.coordinator.admission import Inbound, NotAdmitted, admit
from sentinel.coordinator.config import CoordinatorSettings, join_host_port, split_host_port
from sentinel.coordinator.faults import Fault, Faults
from sentinel.coordinator.keys import Keys
from sentinel.coordinator.zap import DOMAIN, AllowList, ZapSocket
from sentinel.wire.codec import MAX_FRAME_BYTES, FrameRefused
from sentinel.wire.link import PART_ACK, PART_COMMAND

log = logging.getLogger(__name__)

R = TypeVar("R")

POLL_MS = 50
TICK_SECONDS = 0.1
MAX_DRAIN = 1000  # messages per wake-up; then ticks and answers get their turn
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 6000
LINGER_MS = 500
BACKLOG = 4096
FINAL_QUIET_SECONDS = 0.1  # the last drain ends when nothing has come for this long


class ServerUnavailable(RuntimeError):
    """The ROUTER cannot be bound; the text says where and why, in one line."""


@dataclass(slots=True)
class ServerCounts:
    """What went through the sockets."""

    rejected: Counter[str] = field(default_factory=Counter)
    frames: int = 0
    acknowledged: int = 0
    undeliverable: int = 0  # answers whose relay was gone; it asks again when it is back


class Desk(Protocol):
    """The runs' side of the loop; every method is called on the loop's thread."""

    def receive(self, inbound: Inbound, now: float) -> None:
        """Take in one message. Raises NotAdmitted or FrameRefused."""

    def tick(self, now: float) -> None:
        """Time passed."""

    def flush(self) -> None:
        """Hand what this turn produced to the disk."""

    def end_all(self, now: float) -> None:
        """No more messages will come."""

    @property
    def settled(self) -> bool:
        """True when nothing is owed: no acknowledgement, no bundle."""


class Server:
    """The coordinator's loop. ``bind``, then ``start``; ``stop`` drains, ends the runs and returns in bounded time."""

    def __init__(self, settings: CoordinatorSettings, keys: Keys, allowed: AllowList, faults: Faults) -> None:
        self.counts = ServerCounts()
        self.endpoint = ""
        self.beat = time.monotonic()  # when the loop last came round
        self._settings = settings
        self._keys = keys
        self._allowed = allowed
        self._faults = faults
        self._posted: deque[Callable[[], None]] = deque()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._stopping = threading.Event()
        self._deadline = 0.0
        self._tick_due = 0.0
        self._thread = threading.Thread(target=self._run, name="sentinel-coordinator", daemon=True)

    def bind(self) -> str:
        """Bind the ROUTER and return its endpoint with the real port. Raises ServerUnavailable."""
        self._context = zmq.Context()
        self._zap = ZapSocket(self._context, self._allowed)
        self._router = self._make_router()
        try:
            self._router.bind(self._settings.bind)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ServerUnavailable(f"cannot listen on {self._settings.bind}: {error}") from error
        # The host as it was asked for: libzmq would name 127.0.0.1 by its IPv6 form.
        host, _ = split_host_port(self._settings.bind.removeprefix("tcp://"))
        _, port = split_host_port(self._router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://"))
        self.endpoint = f"tcp://{join_host_port(host, port)}"
        return self.endpoint

    def _make_router(self) -> zmq.SyncSocket:
        router = self._context.socket(zmq.ROUTER)
        router.ipv6 = True
        router.router_mandatory = True  # an answer to a peer that is gone must be an error, not silence
        router.router_handover = True  # a relay that reconnects takes its id back; heartbeats reap the frozen old peer
        router.heartbeat_ivl = HEARTBEAT_MS
        router.heartbeat_timeout = router.heartbeat_ttl = HEARTBEAT_TIMEOUT_MS
        router.maxmsgsize = MAX_FRAME_BYTES
        router.linger = LINGER_MS
        router.backlog = BACKLOG
        router.zap_domain = DOMAIN
        router.curve_server = True
        router.curve_publickey = self._keys.server_public.encode()
        router.curve_secretkey = self._keys.server_secret.encode()
        return router

    def start(self, desk: Desk) -> None:
        """Begin to serve ``desk``."""
        self._desk = desk
        self._poller = zmq.Poller()
        for readable in (self._router, self._zap.socket, self._woken):
            self._poller.register(readable, zmq.POLLIN)
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Take what has arrived, end every run and close. False if ``timeout`` seconds were not enough.

        Also undoes ``bind`` where ``start`` never came. A second call does nothing.
        """
        if self._thread.ident is None:
            self._close_sockets()
            return True
        self._deadline = time.monotonic() + timeout
        self._stopping.set()
        self._wake()
        self._thread.join(timeout + 0.5)
        return not self._thread.is_alive()

    def post(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the loop's thread soon. May be called from any thread; lost if the loop has ended."""
        self._posted.append(call)
        self._wake()

    def ask(self, question: Callable[[], R], timeout: float) -> R | None:
        """Result of ``question``, run on the loop's thread; None if the loop did not answer within ``timeout`` seconds."""
        answer: Future[R | None] = Future()
        self.post(lambda: answer.set_result(self._faults.guard(Fault.SNAPSHOT, question)))
        try:
            return answer.result(timeout)
        except TimeoutError:
            return None

    def acknowledge(self, route: bytes, sequence: int) -> None:
        """Tell a relay that a critical frame is on disk."""
        self.counts.acknowledged += self._send(route, [PART_ACK, str(sequence).encode()])

    def send_command(self, route: bytes, frame: bytes) -> None:
        """Send a signed command to a relay."""
        self._send(route, [PART_COMMAND, frame])

    def _send(self, route: bytes, parts: list[bytes]) -> bool:
        try:
            self._router.send_multipart([route, *parts], zmq.NOBLOCK)
        except zmq.ZMQError:  # gone (EHOSTUNREACH) or not reading (EAGAIN)
            self.counts.undeliverable += 1
            return False
        return True

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody is left to wake
            self._waker.send(b"!")

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
            self._finish()
        finally:
            self._close_sockets()

    def _turn(self) -> None:
        self._poll(POLL_MS)
        now = time.monotonic()
        if now >= self._tick_due:
            self._tick_due = now + TICK_SECONDS
            self._faults.guard(Fault.TICK, self._desk.tick, time.time())
        self._desk.flush()
        self.beat = time.monotonic()

    def _poll(self, timeout_ms: int) -> int:
        """Wait for something, then take all that is there. Returns how many messages came."""
        ready = {source for source, _ in self._poller.poll(timeout_ms)}
        if self._zap.socket in ready:
            self._zap.answer_pending()
        drained = self._drain() if self._router in ready else 0
        self._run_posted()
        return drained

    def _drain(self) -> int:
        for count in range(MAX_DRAIN):
            try:
                message = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return count
            self.counts.frames += 1
            self._faults.guard(Fault.MESSAGE, self._one, message)
        return MAX_DRAIN

    def _one(self, message: list[zmq.Frame]) -> None:
        try:
            self._desk.receive(admit(message, self._allowed), time.time())
        except (NotAdmitted, FrameRefused) as refusal:
            self.counts.rejected[refusal.reason.value] += 1
            log.debug("%s", refusal)

    def _run_posted(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        for _ in range(len(self._posted)):
            self._faults.guard(Fault.MESSAGE, self._posted.popleft())

    def _finish(self) -> None:
        """The last drain, the end of every run, and what is still owed for both."""
        quiet_since = time.monotonic()
        while time.monotonic() < min(quiet_since + FINAL_QUIET_SECONDS, self._deadline):
            if self._poll(20):
                quiet_since = time.monotonic()
        self._faults.guard(Fault.TICK, self._desk.end_all, time.time())
        self._desk.flush()
        while not self._desk.settled and time.monotonic() < self._deadline:
            self._poll(20)
            self._desk.flush()

    def _close_sockets(self) -> None:
        self._router.close()
        self._zap.close()
        self._context.term()
        self._woken.close()
        self._waker.close()
