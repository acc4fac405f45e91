"""A relay as a coordinator sees it: a real CURVE DEALER, and the reports it sends (helpers of tests)."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence

import zmq

from sentinel.wire.codec import decode_command, encode_reports
from sentinel.wire.link import Envelope, Join, encode_envelope
from sentinel.wire.messages import (
    Check,
    ClosedBy,
    Collective,
    Command,
    Evidence,
    Hello,
    Phase,
    Report,
    Role,
    RoundClosed,
)

DEADLINE_SECONDS = 10.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll until ``condition`` holds; fails after a deadline, saying what did not happen."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.01)


class RelayClient:
    """A real CURVE DEALER that speaks the relay's side of the link."""

    def __init__(
        self,
        join: Join,
        run_id: str = "run",
        *,
        relay: str = "relay-0",
        node: int = 0,
        world_size: int = 2,
        keys: tuple[bytes, bytes] | None = None,
        routing_id: bytes | None = None,
    ) -> None:
        self.join, self.run_id, self.relay, self.node, self.world_size = join, run_id, relay, node, world_size
        self.sequence = itertools.count(1)
        self.acks: list[int] = []
        self.commands: list[Command] = []
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndtimeo = int(DEADLINE_SECONDS * 1000)
        self.socket.ipv6 = True
        self.socket.reconnect_ivl = 20
        self.socket.routing_id = routing_id or relay.encode()
        public, secret = keys or (join.client_public.encode(), join.client_secret.encode())
        self.socket.curve_publickey, self.socket.curve_secretkey = public, secret
        self.socket.curve_serverkey = join.server_key.encode()
        self.socket.connect(join.endpoint)

    def send(self, reports: Sequence[Report], sequence: int | None = None) -> int:
        """Send one frame of reports; returns its sequence number."""
        number = next(self.sequence) if sequence is None else sequence
        self.send_raw(self.envelope(number), encode_reports(reports))
        return number

    def envelope(self, sequence: int) -> bytes:
        """Envelope of this relay."""
        return encode_envelope(Envelope(self.run_id, self.node, self.relay, sequence, self.world_size))

    def send_raw(self, *parts: bytes) -> None:
        """Send any parts at all."""
        self.socket.send_multipart(parts)

    def knock(self) -> None:
        """Try to send a frame without waiting: a peer that is refused may have no connection to put it on."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([self.envelope(1), encode_reports([hello(0)])], zmq.NOBLOCK)

    def listen(self, milliseconds: int = 0) -> None:
        """Take in what the coordinator has sent, waiting at most this long for the first message."""
        while self.socket.poll(milliseconds):
            kind, body = self.socket.recv_multipart()
            milliseconds = 0
            if kind == b"ack":
                self.acks.append(int(body))
            else:
                self.commands.append(decode_command(body, bytes.fromhex(self.join.command_key), time.time()))

    def await_ack(self, sequence: int) -> None:
        """Wait until this frame is acknowledged."""
        wait_until(lambda: self.listen(20) or sequence in self.acks, f"acknowledgement of {sequence}")

    def await_command(self, kind: type[Command]) -> Command:
        """Wait for a command of this kind."""
        wait_until(lambda: self.listen(20) or any(isinstance(c, kind) for c in self.commands), f"a {kind.__name__}")
        return next(c for c in self.commands if isinstance(c, kind))

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def hello(rank: int, world_size: int = 2) -> Hello:
    """A rank's first report."""
    return Hello(0, rank, rank, 0, world_size, 100 + rank, "host", "0", "2", 1.0)


def closed(rank: int, round_: int = 0, evidence: int = 0) -> RoundClosed:
    """The end of a round on one rank."""
    return RoundClosed(0, rank, round_, round_, ClosedBy.OPTIMIZER, 1.0, evidence, 1, check_seconds=0.001)


def evidence(rank: int, round_: int = 0) -> Evidence:
    """A raw gradient with three NaN on one rank."""
    found = Check(10, 3, 0, 1.0)
    seen = Collective("0", (0, 1), 0, "allreduce_", "sum", "float32", Role.GRADIENT, found, found, found)
    return Evidence(0, rank, round_, round_, 0, Phase.RAW, 1.0, found, ("w",), 1, seen)


def fault_of(rank: int, round_: int = 0) -> list[Report]:
    """All that two ranks report when one of them had nonfinite gradients."""
    other = 1 - rank
    return [evidence(rank, round_), closed(rank, round_, evidence=1), closed(other, round_)]
