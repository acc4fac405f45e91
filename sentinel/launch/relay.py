"""The node's relay: takes frames from the ranks beside it and gets them to the coordinator, and commands back.

Owns one thread and the promise that a rank never waits for the coordinator. Frames are not decoded here: their class byte
says whether they may be dropped (samples, newest win) or are kept and spooled until acknowledged (critical).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

import zmq

from sentinel.launch.downlink import Downlink
from sentinel.launch.outbox import Drop, Outbox
from sentinel.launch.shelf import Shelf
from sentinel.launch.spool import Spool
from sentinel.launch.uplink import CurveUplink, NoUplink, Uplink
from sentinel.wire.codec import (
    CLASS_CRITICAL,
    CLASS_SAMPLE,
    FrameRefused,
    Refusal,
    decode_command,
    encode_reports,
    frame_class,
)
from sentinel.wire.link import PART_ACK, PART_COMMAND, Envelope, Join, encode_envelope
from sentinel.wire.messages import Counted, DumpRequest, NodeEnded, PartWanted, Report
from sentinel.wire.names import SPOOL

POLL_MS = 50  # also the longest time a call from the launcher's thread waits to be seen
COUNTED_SECONDS = 5.0
MAX_SENDS = 256  # frames per turn and class, so that the ranks' socket is read in between
QUIET_SECONDS = 0.1
QUIET_MAX_SECONDS = 2.0
RELAY_RANK = -1  # the rank a Counted of a relay carries


@dataclass(frozen=True, slots=True)
class RelayIdentity:
    """Whose frames these are: fields of every envelope."""

    run_id: str
    node: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Drained:
    """What was left when the relay was told to finish. ``drops`` counts by ``outbox.Drop`` and ``codec.Refusal``."""

    unsent_critical: int
    drops: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Ending:
    exit_code: int
    at: float  # monotonic seconds

    def is_due(self, now: float, heard_at: float) -> bool:
        """True once the ranks have been silent for a moment: what they left behind comes first.

        A child that outlives its rank and keeps talking must not hold the news back for long.
        """
        return now - max(self.at, heard_at) >= QUIET_SECONDS or now - self.at >= QUIET_MAX_SECONDS


class Relay:
    """One per launcher. ``join`` None: no coordinator is known, critical frames go to the spool and stay there.

    Raises OSError or zmq.ZMQError if its sockets cannot be made.
    """

    def __init__(self, identity: RelayIdentity, join: Join | None, run_dir: Path) -> None:
        self.name = f"{identity.node}-{os.getpid()}-{secrets.token_hex(4)}"
        self.failure: str | None = None  # why the thread ended before it was told to
        self._identity = identity
        self._command_key = bytes.fromhex(join.command_key) if join else b""
        self._context = zmq.Context()
        self._downlink = Downlink(self._context)
        self._uplink: Uplink = CurveUplink(self._context, join, self.name) if join else NoUplink()
        self._shelf = Shelf(run_dir)
        self._pieces: deque[tuple[bytes, bytes]] = deque()
        self._spool = Spool(run_dir / SPOOL, self.name)
        self._outbox = Outbox()
        self._faults: Counter[str] = Counter()
        self._said: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._say_at = self._heard_at = 0.0  # monotonic seconds
        self._sequence = 0
        self._ending: deque[_Ending] = deque()  # put in by the launcher's thread, taken out by ours
        self._unspooled: list[tuple[bytes, bytes]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sentinel-relay", daemon=True)

    @property
    def address(self) -> str:
        """``ipc://`` address for the ranks of this node."""
        return self._downlink.address

    @property
    def connected(self) -> bool:
        """True while the coordinator is there and has accepted our keys."""
        return self._uplink.connected

    @property
    def refused(self) -> bool:
        """True if the coordinator was reached but did not accept our keys."""
        return self._uplink.refused

    @property
    def lending(self) -> bool:
        """True while a coordinator on another host fetches parts of this node."""
        return self._shelf.busy and self._thread.is_alive()

    def start(self) -> Relay:
        """Begin to relay."""
        self._thread.start()
        return self

    def node_ended(self, exit_code: int) -> None:
        """Tell the coordinator that this node's processes are gone, once all they sent has been read."""
        self._ending.append(_Ending(exit_code, time.monotonic()))

    def drain(self, timeout: float) -> Drained:
        """Wait until everything critical is acknowledged and every sample sent, at most ``timeout`` seconds.

        Without a coordinator there is nobody to wait for: only what the ranks left behind is taken in.
        """
        deadline = time.monotonic() + timeout
        while not self._done() and self._thread.is_alive() and time.monotonic() < deadline:
            self._stop.wait(0.02)
        return self.drained()

    def drained(self) -> Drained:
        """What is unacknowledged and what was lost until now."""
        return Drained(self._outbox.unacknowledged, dict(self._outbox.drops))

    def stop(self, timeout: float = 5.0) -> Drained:
        """End the thread and close everything; the spool stays if it still holds something."""
        self._stop.set()
        if self._thread.ident is None:
            self._close()
        else:
            self._thread.join(timeout)
        return self.drained()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn(POLL_MS)
            self._outbox.abandon_samples()
        except Exception as error:  # noqa: BLE001 - the channel thread: its end is named, and training goes on
            self.failure = f"{type(error).__name__}: {error}"
            self._faults["relay_stopped"] += 1
        finally:
            self._close()

    def _turn(self, wait_ms: int) -> None:
        now = self._poll(wait_ms)
        if self._uplink.renewed():
            self._outbox.connection_renewed(now)
        for parts in self._downlink.receive():
            self._heard_at = now
            self._take(parts, now)
        self._take_own(now)
        self._take_pieces()
        self._send(now)
        self._write_spool()
        for parts in self._uplink.receive():
            self._obey(parts)

    def _poll(self, wait_ms: int) -> float:
        poller = zmq.Poller()
        for socket in (self._downlink.socket, self._shelf.socket, *self._uplink.sockets()):
            poller.register(socket, zmq.POLLIN)
        poller.poll(wait_ms)
        return time.monotonic()

    def _take(self, parts: list[bytes], now: float) -> None:
        """Classify and queue one message of a rank."""
        try:
            if len(parts) != 1:
                raise FrameRefused(Refusal.NOT_OURS, f"{len(parts)} parts")
            kind = frame_class(parts[0])
            if kind not in (CLASS_CRITICAL, CLASS_SAMPLE):
                raise FrameRefused(Refusal.NOT_OURS, "not a report frame")
        except FrameRefused as refused:
            self._outbox.drops[refused.reason] += 1
            return
        self._queue(kind, parts[0], now)

    def _queue(self, kind: bytes, frame: bytes, now: float) -> None:
        envelope = self._envelope()
        if kind == CLASS_SAMPLE:
            self._outbox.add_sample(envelope, frame, self._uplink.connected)
        elif self._outbox.add_critical(self._sequence, envelope, frame, now):
            self._unspooled.append((envelope, frame))

    def _envelope(self) -> bytes:
        self._sequence += 1
        who = self._identity
        return encode_envelope(Envelope(who.run_id, who.node, self.name, self._sequence, who.world_size))

    def _take_own(self, now: float) -> None:
        """Queue the relay's own reports: that the node ended, and from time to time what was lost."""
        while self._ending and self._ending[0].is_due(now, self._heard_at):
            ended = NodeEnded(self._downlink.attempt, self._identity.node, self._ending[0].exit_code)
            self._report([self._counted(), ended], now)
            self._ending.popleft()
        losses = (dict(self._outbox.drops), dict(self._faults))
        if self._uplink.connected and now >= self._say_at and losses != self._said:
            self._report([self._counted()], now)
            self._said, self._say_at = losses, now + COUNTED_SECONDS

    def _take_pieces(self) -> None:
        """Queue pieces of parts. Without a connection they are let go: whoever still wants them asks again."""
        for frame in self._shelf.receive():
            self._pieces.append((self._envelope(), frame))
        if not self._uplink.connected:
            self._pieces.clear()

    def _report(self, reports: list[Report], now: float) -> None:
        frame = encode_reports(reports)
        self._queue(frame_class(frame), frame, now)

    def _counted(self) -> Counted:
        node = self._identity.node
        return Counted(self._downlink.attempt, RELAY_RANK, node, dict(self._outbox.drops), dict(self._faults))

    def _send(self, now: float) -> None:
        """Critical frames first; whatever the socket does not take stays queued."""
        for sequence, parts in self._outbox.due(now, MAX_SENDS):
            if not self._uplink.send(parts):
                return
            self._outbox.sent(sequence, now)
        while self._pieces and self._uplink.send(self._pieces[0]):
            self._pieces.popleft()
        for _ in range(MAX_SENDS):
            sample = self._outbox.next_sample()
            if sample is None or not self._uplink.send(sample):
                return
            self._outbox.sample_sent()

    def _write_spool(self) -> None:
        """One fsync for all critical frames of this turn; a full disk costs the copy on disk, not the report."""
        if not self._unspooled:
            return
        try:
            self._spool.append(self._unspooled)
        except OSError:
            self._outbox.drops[Drop.SPOOL_FAILED] += len(self._unspooled)
        self._unspooled.clear()

    def _obey(self, parts: list[bytes]) -> None:
        """An acknowledgement, or a command for ranks."""
        match parts:
            case [kind, sequence] if kind == PART_ACK and sequence.isdigit():
                if self._outbox.acknowledge(int(sequence)) and not self._outbox.unacknowledged:
                    with contextlib.suppress(OSError):
                        self._spool.clear()
            case [kind, frame] if kind == PART_COMMAND:
                self._forward(frame)
            case _:
                self._faults["unknown_message"] += 1

    def _forward(self, frame: bytes) -> None:
        try:
            command = decode_command(frame, self._command_key, time.time())
        except FrameRefused as refused:
            self._faults[f"command_{refused.reason}"] += 1
            return
        if isinstance(command, PartWanted):
            self._shelf.ask(command)
            return
        if not self._downlink.forward(command, frame) and isinstance(command, DumpRequest):
            self._outbox.drops[Drop.COMMAND_UNDELIVERED] += 1  # a Released finds its rank gone as a matter of course

    def _done(self) -> bool:
        if self._ending:  # asked first: an ending is queued before it is taken out
            return False
        alone = isinstance(self._uplink, NoUplink)
        return alone or not (self._outbox.unacknowledged or self._outbox.waiting_samples)

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._spool.close()
        self._shelf.close()
        self._uplink.close()
        self._downlink.close()
        self._context.term()
