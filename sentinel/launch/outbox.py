"""What a relay holds until the coordinator has it: critical frames until acknowledged, samples while there is room.

Owns the bounds, the order and the names of losses. Pure: no sockets, no files, no clock of its own.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from enum import StrEnum

MAX_SAMPLES = 4096  # frames
MAX_SAMPLE_BYTES = 16 << 20
MAX_CRITICAL = 16_384  # frames
MAX_CRITICAL_BYTES = 64 << 20
RESEND_SECONDS = 2.0  # an acknowledgement that takes longer is taken for lost
RESEND_MAX_SECONDS = 30.0


class Drop(StrEnum):
    """Why a relay lost something; the keys of ``Counted.drops`` of a node (refused frames use ``codec.Refusal``)."""

    RELAY_FULL = "relay_full"  # samples came faster than the coordinator took them
    COORDINATOR_UNREACHABLE = "coordinator_unreachable"  # no connection: the oldest samples made way, or the run ended
    CRITICAL_FULL = "critical_full"  # so many unacknowledged critical frames that a newer one found no room
    SPOOL_FAILED = "spool_failed"  # kept in memory, but not on disk
    COMMAND_UNDELIVERED = "command_undelivered"  # no rank of this node could be given the command


@dataclass(slots=True)
class _Pending:
    parts: tuple[bytes, bytes]
    due: float  # when to send (again), monotonic seconds
    wait: float  # seconds until the next try after that


class Outbox:
    """Frames on their way up. Samples: the newest win. Critical frames: the oldest win, since they hold a fault's origin."""

    def __init__(self) -> None:
        self.drops: Counter[str] = Counter()
        self._samples: deque[tuple[bytes, bytes]] = deque()
        self._sample_bytes = 0
        self._critical: OrderedDict[int, _Pending] = OrderedDict()
        self._critical_bytes = 0

    @property
    def unacknowledged(self) -> int:
        """Critical frames that no coordinator has acknowledged."""
        return len(self._critical)

    @property
    def waiting_samples(self) -> int:
        """Samples not yet given to the socket."""
        return len(self._samples)

    def add_sample(self, envelope: bytes, frame: bytes, connected: bool) -> None:
        """Queue a sample; the oldest ones make way and are counted under the reason that holds now."""
        self._samples.append((envelope, frame))
        self._sample_bytes += len(frame)
        while len(self._samples) > MAX_SAMPLES or self._sample_bytes > MAX_SAMPLE_BYTES:
            _, dropped = self._samples.popleft()
            self._sample_bytes -= len(dropped)
            self.drops[Drop.RELAY_FULL if connected else Drop.COORDINATOR_UNREACHABLE] += 1

    def add_critical(self, sequence: int, envelope: bytes, frame: bytes, now: float) -> bool:
        """Keep a critical frame until acknowledged. False (and counted) if there is no room left."""
        if len(self._critical) >= MAX_CRITICAL or self._critical_bytes + len(frame) > MAX_CRITICAL_BYTES:
            self.drops[Drop.CRITICAL_FULL] += 1
            return False
        self._critical[sequence] = _Pending((envelope, frame), due=now, wait=RESEND_SECONDS)
        self._critical_bytes += len(frame)
        return True

    def acknowledge(self, sequence: int) -> bool:
        """Forget a critical frame. False if it was not (or no longer) waited for."""
        pending = self._critical.pop(sequence, None)
        if pending is None:
            return False
        self._critical_bytes -= len(pending.parts[1])
        return True

    def due(self, now: float, limit: int) -> list[tuple[int, tuple[bytes, bytes]]]:
        """At most ``limit`` critical frames whose time to be sent has come, oldest first."""
        ready = []
        for sequence, pending in self._critical.items():
            if pending.due <= now:
                ready.append((sequence, pending.parts))
                if len(ready) == limit:
                    break
        return ready

    def sent(self, sequence: int, now: float) -> None:
        """A critical frame went out; without an acknowledgement it is due again later, each time twice as late."""
        pending = self._critical[sequence]
        pending.due = now + pending.wait
        pending.wait = min(pending.wait * 2, RESEND_MAX_SECONDS)

    def connection_renewed(self, now: float) -> None:
        """What was in flight may be lost: everything unacknowledged is due at once."""
        for pending in self._critical.values():
            pending.due, pending.wait = now, RESEND_SECONDS

    def next_sample(self) -> tuple[bytes, bytes] | None:
        """Oldest queued sample, or None; call ``sample_sent`` once the socket took it."""
        return self._samples[0] if self._samples else None

    def sample_sent(self) -> None:
        """Forget the sample that ``next_sample`` returned."""
        _, frame = self._samples.popleft()
        self._sample_bytes -= len(frame)

    def abandon_samples(self) -> None:
        """The run is over: count what was never sent."""
        if self._samples:
            self.drops[Drop.COORDINATOR_UNREACHABLE] += len(self._samples)
            self._samples.clear()
            self._sample_bytes = 0
