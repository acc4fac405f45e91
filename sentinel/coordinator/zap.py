"""Who may connect: the ZeroMQ authentication protocol (ZAP) over an allow-list of CURVE public keys.

Owns the ZAP socket and its replies. Runs on whatever thread polls it (the server's); an allowed key becomes the connection's
User-Id, which is the only identity the rest of the coordinator believes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import zmq
from zmq.utils import z85

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"sentinel"  # the ROUTER's ZAP_DOMAIN must be this very name, or everyone is refused
VERSION = b"1.0"


class AllowList:
    """CURVE public keys (Z85) that may connect. Reads and writes of a set are atomic, so any thread may allow or revoke."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = set(keys)
        self.denied = 0

    def allow(self, key: str) -> None:
        """Let this key connect from now on."""
        self._keys.add(key)

    def revoke(self, key: str) -> None:
        """Refuse this key at its next connection, and its frames from now on."""
        self._keys.discard(key)

    def __contains__(self, key: object) -> bool:
        return key in self._keys


class ZapSocket:
    """Answers libzmq's questions about new connections of one context; there can be one per context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: AllowList) -> None:
        self._allowed = allowed
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(ENDPOINT)

    def answer_pending(self) -> None:
        """Answer every question that waits now."""
        while True:
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(question)

    def _answer(self, question: Sequence[bytes]) -> None:
        # libzmq asks as a REQ would: routing id, empty delimiter, then the fields of the protocol.
        if len(question) < 8:
            return
        route, _, version, request_id, domain, _, _, mechanism, *credentials = question
        user = self._user(version, domain, mechanism, credentials)
        if user is None:
            self._allowed.denied += 1
        verdict = [b"200", b"OK", user, b""] if user is not None else [b"400", b"key not allowed", b"", b""]
        self.socket.send_multipart([route, b"", VERSION, request_id, *verdict])

    def _user(self, version: bytes, domain: bytes, mechanism: bytes, credentials: Sequence[bytes]) -> bytes | None:
        """The User-Id for an allowed connection, None for any other."""
        if version != VERSION or domain != DOMAIN or mechanism != b"CURVE" or len(credentials) != 1:
            return None
        if len(credentials[0]) != 32:
            return None
        key = z85.encode(credentials[0])
        return key if key.decode() in self._allowed else None

    def close(self) -> None:
        """Stop answering; new connections are then refused by libzmq."""
        self.socket.close()
