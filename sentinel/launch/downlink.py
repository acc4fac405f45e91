"""The sockets between a node's relay and the ranks beside it: one ROUTER on a private ipc path.

Owns the path (a directory only this user can enter), who the ranks are, and handing commands to them. All methods but
``address`` belong to the relay's thread.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from sentinel.wire.codec import MAX_FRAME_BYTES
from sentinel.wire.messages import Command

MAX_IPC_PATH = 106  # bytes; sun_path holds 108 with its NUL, and libzmq wants one more
HIGH_WATER_FRAMES = 1000
MAX_DRAIN = 1000  # frames per wake-up, so that one loud rank cannot starve the rest
MAX_PEERS = 4096

_IDENTITY = re.compile(rb"rank-(\d{1,9})-(\d{1,9})-(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank's process, as its socket's identity ``rank-<attempt>-<rank>-<pid>`` says."""

    attempt: int
    rank: int

    @staticmethod
    def of(identity: bytes) -> Peer | None:
        """Peer of a socket identity, None if it is not a rank's."""
        match = _IDENTITY.fullmatch(identity)
        return Peer(int(match[1]), int(match[2])) if match else None


class Downlink:
    """ROUTER for the ranks of this node. Raises OSError or zmq.ZMQError if it cannot be set up."""

    def __init__(self, context: zmq.SyncContext) -> None:
        self._directory = _private_directory()
        atexit.register(self._remove_directory)  # for an end that does not come to close()
        self.address = f"ipc://{self._directory / 'relay'}"
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = HIGH_WATER_FRAMES
        self.socket.maxmsgsize = MAX_FRAME_BYTES
        self.socket.router_mandatory = True  # a rank that is gone must be an error, not silence
        self.socket.router_handover = True  # the same process may connect again under its identity
        self.socket.bind(self.address)
        self._peers: dict[bytes, Peer] = {}

    @property
    def attempt(self) -> int:
        """Newest attempt any rank of this node belonged to; 0 before the first."""
        return max((peer.attempt for peer in self._peers.values()), default=0)

    def receive(self) -> Iterator[list[bytes]]:
        """Messages of the ranks that have arrived, without the identity part; at most MAX_DRAIN."""
        for _ in range(MAX_DRAIN):
            try:
                identity, *parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._remember(identity)
            yield parts

    def forward(self, command: Command, frame: bytes) -> int:
        """Give a command to the ranks it names (empty: all of its attempt); how many took it."""
        wanted = set(command.ranks)
        taken = 0
        for identity, peer in list(self._peers.items()):
            if peer.attempt == command.attempt and (not wanted or peer.rank in wanted):
                taken += self._give(identity, frame)
        return taken

    def close(self) -> None:
        """Close the socket and remove the private directory."""
        self.socket.close()
        self._remove_directory()
        atexit.unregister(self._remove_directory)

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _remember(self, identity: bytes) -> None:
        peer = Peer.of(identity)
        if peer is not None:
            self._peers.pop(identity, None)  # to the end: the quietest peers are forgotten first
            self._peers[identity] = peer
            if len(self._peers) > MAX_PEERS:
                del self._peers[next(iter(self._peers))]

    def _give(self, identity: bytes, frame: bytes) -> bool:
        try:
            self.socket.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.Again:
            return False  # this rank reads nothing at the moment
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            del self._peers[identity]
            return False
        return True


def _private_directory() -> Path:
    """A new 0700 directory with a path short enough for a socket.

    Not below XDG_RUNTIME_DIR: that directory goes away when the user logs out, and a job outlives a login. Raises OSError.
    """
    directory = Path(tempfile.mkdtemp(prefix="sentinel-"))
    if len(str(directory / "relay").encode()) > MAX_IPC_PATH:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="sentinel-", dir="/tmp"))
    return directory
