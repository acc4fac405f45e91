"""A coordinator's socket for relay tests: a real CURVE ROUTER that shows what came and answers as it is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import zmq

from sentinel.wire.codec import decode_reports
from sentinel.wire.link import Envelope, Join, decode_envelope
from sentinel.wire.messages import Report

COMMAND_KEY = "ab" * 32


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Poll ``condition`` until it holds; fails the test at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            pytest.fail(f"still not true after {seconds} s")
        time.sleep(0.01)


class FakeCoordinator:
    """The coordinator's side of the wire, driven by the test."""

    def __init__(self, port: int | None = None, keys: tuple[bytes, bytes] | None = None) -> None:
        self.keys = keys or zmq.curve_keypair()
        self.client = zmq.curve_keypair()
        self._context = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.router.curve_server = True
        self.router.curve_publickey, self.router.curve_secretkey = self.keys
        if port is None:
            self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        else:
            self._bind_again(port)
        self.peer = b""

    @property
    def join(self) -> Join:
        """How a relay reaches this socket."""
        public, secret = (key.decode() for key in self.client)
        endpoint = f"tcp://127.0.0.1:{self.port}"
        return Join(
            endpoint=endpoint,
            server_key=self.keys[0].decode(),
            client_public=public,
            client_secret=secret,
            command_key=COMMAND_KEY,
        )

    def receive(self, seconds: float = 5.0) -> tuple[Envelope, list[Report]]:
        """Next message of a relay."""
        if not self.router.poll(int(seconds * 1000)):
            pytest.fail(f"nothing came within {seconds} s")
        self.peer, envelope, frame = self.router.recv_multipart()
        return decode_envelope(envelope), decode_reports(frame)

    def quiet(self, seconds: float) -> bool:
        """True if nothing comes for so long."""
        return not self.router.poll(int(seconds * 1000))

    def answer(self, *parts: bytes) -> None:
        """Send to the relay that was heard last."""
        self.router.send_multipart([self.peer, *parts])

    def acknowledge(self, envelope: Envelope) -> None:
        """Acknowledge one frame."""
        self.answer(b"ack", str(envelope.sequence).encode())

    def close(self) -> None:
        """Close the socket, as a coordinator that is killed."""
        self._context.destroy(linger=0)

    def _bind_again(self, port: int) -> None:
        def bound() -> bool:
            with suppress(zmq.ZMQError):
                self.router.bind(f"tcp://127.0.0.1:{port}")
                return True
            return False

        wait_for(bound)
        self.port = port


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    """A coordinator's socket, closed after the test."""
    fake = FakeCoordinator()
    yield fake
    fake.close()


@pytest.fixture
def fake_coordinator() -> Iterator[Callable[..., FakeCoordinator]]:
    """Make coordinators' sockets, also one after another on the same port; all closed after the test."""
    made: list[FakeCoordinator] = []

    def make(port: int | None = None, keys: tuple[bytes, bytes] | None = None) -> FakeCoordinator:
        made.append(FakeCoordinator(port, keys))
        return made[-1]

    yield make
    for fake in made:
        fake.close()


@pytest.fixture
def wait() -> Callable[..., None]:
    """``wait_for``, for tests."""
    return wait_for
