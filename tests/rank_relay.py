"""A node's relay as its ranks see it: a real ROUTER on ipc that shows what came and sends what it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq
from relay_client import wait_until

from sentinel.wire.codec import decode_reports, encode_command
from sentinel.wire.messages import Command, Report

KEY = b"\xab" * 32


class Relay:
    """A node's relay as a rank sees it: a ROUTER on ipc."""

    def __init__(self, directory: Path) -> None:
        self.address = f"ipc://{directory}/relay"
        self.frames: list[bytes] = []
        self.peer = b""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.rcvhwm = 0
        self.socket.bind(self.address)

    def take(self, milliseconds: int = 10) -> None:
        """Take in what has come."""
        while self.socket.poll(milliseconds):
            self.peer, frame = self.socket.recv_multipart()
            self.frames.append(frame)
            milliseconds = 0

    @property
    def reports(self) -> list[Report]:
        """Reports of all frames, in the order they came."""
        return [report for frame in self.frames for report in decode_reports(frame)]

    def await_report(self, kind: type[Any]) -> Any:
        """The first report of this kind."""
        wait_until(lambda: self.take() or any(isinstance(r, kind) for r in self.reports), f"a {kind.__name__}")
        return next(r for r in self.reports if isinstance(r, kind))

    def command(self, command: Command, key: bytes = KEY) -> None:
        """Send a command to the rank heard last."""
        self.raw(encode_command(command, key))

    def raw(self, *frames: bytes) -> None:
        """Send anything to the rank heard last."""
        self.socket.send_multipart([self.peer, *frames])

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)
