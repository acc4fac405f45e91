"""The one connection from a node to the coordinator: a CURVE DEALER that is never waited for.

Owns socket options and the state of the connection. What is sent, kept and sent again is decided by the relay. All methods
belong to the relay's thread.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from sentinel.wire.codec import MAX_FRAME_BYTES
from sentinel.wire.link import Join

HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 6000
RECONNECT_FIRST_MS = (100, 500)  # drawn at random, so that thousands of relays do not come back in step
RECONNECT_MAX_MS = 30_000
LINGER_MS = 500
HIGH_WATER_FRAMES = 1000  # beyond it frames wait in the relay's own queue, where the newest win

_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


class Uplink(Protocol):
    """Where a relay's frames go."""

    connected: bool
    refused: bool  # the coordinator was reached but did not accept our keys

    def sockets(self) -> tuple[zmq.SyncSocket, ...]:
        """Sockets to poll for reading."""

    def send(self, parts: tuple[bytes, bytes]) -> bool:
        """Hand a message over without waiting; False if it must wait."""

    def receive(self) -> Iterator[list[bytes]]:
        """Messages that have arrived."""

    def renewed(self) -> bool:
        """True once after each time the connection came up."""

    def close(self) -> None:
        """Let go of the sockets."""


class NoUplink:
    """Stands where no coordinator is known: everything stays with the relay and its spool."""

    connected = False
    refused = False

    def sockets(self) -> tuple[zmq.SyncSocket, ...]:
        """Nothing to poll."""
        return ()

    def send(self, parts: tuple[bytes, bytes]) -> bool:
        """Never takes anything."""
        return False

    def receive(self) -> Iterator[list[bytes]]:
        """Nothing ever arrives."""
        return iter(())

    def renewed(self) -> bool:
        """There is no connection."""
        return False

    def close(self) -> None:
        """Nothing to let go of."""


class CurveUplink:
    """A DEALER to the coordinator of ``join``; libzmq reconnects by itself, a monitor tells us when."""

    def __init__(self, context: zmq.SyncContext, join: Join, relay: str) -> None:
        self.connected = False
        self.refused = False
        self._socket = _dealer(context, join, relay)
        self._monitor = self._socket.get_monitor_socket()
        self._socket.connect(join.endpoint)

    def sockets(self) -> tuple[zmq.SyncSocket, ...]:
        """The connection and its monitor."""
        return self._socket, self._monitor

    def send(self, parts: tuple[bytes, bytes]) -> bool:
        """Hand a message over without waiting; False while disconnected or when the coordinator takes nothing.

        Only after the monitor has told of the connection: what is handed over before would be taken for lost by it.
        """
        if not self.connected:
            return False
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Iterator[list[bytes]]:
        """Messages that have arrived, without waiting for more."""
        while True:
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def renewed(self) -> bool:
        """Read the monitor. True if a handshake succeeded since the last call."""
        came_up = False
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected, self.refused, came_up = True, False, True
            elif event == zmq.EVENT_DISCONNECTED:
                self.connected = False
            elif event in _REFUSALS:
                self.connected, self.refused = False, True
        return came_up

    def close(self) -> None:
        """Close both sockets; what is still queued has LINGER_MS to leave."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS)


def _dealer(context: zmq.SyncContext, join: Join, relay: str) -> zmq.SyncSocket:
    dealer = context.socket(zmq.DEALER)
    dealer.routing_id = relay.encode()
    dealer.ipv6 = True  # without it a connection to an IPv6 peer is accepted and never delivers
    dealer.immediate = True  # queue only on a live connection; until then the relay's bounded queue decides
    dealer.sndhwm = dealer.rcvhwm = HIGH_WATER_FRAMES
    dealer.maxmsgsize = MAX_FRAME_BYTES
    dealer.linger = LINGER_MS
    dealer.heartbeat_ivl = HEARTBEAT_MS
    dealer.heartbeat_timeout = dealer.heartbeat_ttl = HEARTBEAT_TIMEOUT_MS
    dealer.reconnect_ivl = random.randint(*RECONNECT_FIRST_MS)  # noqa: S311 - spreads load, keeps no secret
    dealer.reconnect_ivl_max = RECONNECT_MAX_MS
    dealer.curve_serverkey = join.server_key.encode()
    dealer.curve_publickey = join.client_public.encode()
    dealer.curve_secretkey = join.client_secret.encode()
    return dealer
