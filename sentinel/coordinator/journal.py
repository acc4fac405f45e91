"""What one turn of the loop must put on disk, and which frames are owed an acknowledgement once it is there.

Owns the order "commit, then acknowledge". Runs on the loop's thread; the commit itself is the writer's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sentinel.coordinator.admission import Inbound
from sentinel.coordinator.deliveries import Deliveries, Delivery, Key
from sentinel.coordinator.writer import PutIncident, StoreWriter, Write

Post = Callable[[Callable[[], None]], None]
"""Runs a call on the loop's thread; may be called from any thread."""

Acknowledge = Callable[[bytes, int], None]
"""Sends an acknowledgement of a sequence number to a route."""

MAX_BACKLOG_ROWS = 50_000


class Journal:
    """Gathers writes and debts; ``flush`` hands both to the writer as one transaction."""

    def __init__(self, writer: StoreWriter, post: Post, acknowledge: Acknowledge) -> None:
        self.deliveries = Deliveries()
        self._writer = writer
        self._post = post
        self._acknowledge = acknowledge
        self._writes: list[Write] = []
        self._owed: list[tuple[bytes, Key]] = []
        self._unsettled = 0  # acknowledgements that wait for a commit

    @property
    def settled(self) -> bool:
        """True when nothing waits for a commit to be acknowledged."""
        return not self._owed and not self._unsettled

    @property
    def behind(self) -> bool:
        """True while the disk is so far behind that nothing more should be taken in."""
        return self._writer.backlog + len(self._writes) > MAX_BACKLOG_ROWS

    def write(self, write: Write) -> None:
        """Put this on disk with the next flush."""
        self._writes.append(write)

    def delivery(self, inbound: Inbound) -> Delivery:
        """Whether this critical frame is new. A committed one is acknowledged again, a new one once it is committed."""
        key = (inbound.envelope.run_id, inbound.envelope.relay, inbound.envelope.sequence)
        delivery = self.deliveries.of(key)
        if delivery is Delivery.COMMITTED:
            self._acknowledge(inbound.route, inbound.envelope.sequence)
        elif delivery is Delivery.NEW:
            self.deliveries.handled(key)
            self._owed.append((inbound.route, key))
        return delivery

    def flush(self) -> None:
        """Hand over what was gathered. Acknowledgements follow when the commit is done."""
        if not self._writes and not self._owed:
            return
        writes, owed = self._writes, self._owed
        self._writes, self._owed = [], []
        done = partial(self._post, partial(self._settle, owed)) if owed else None
        self._unsettled += len(owed)
        self._writer.submit(writes, done, urgent=any(isinstance(w, PutIncident) for w in writes))

    def _settle(self, owed: list[tuple[bytes, Key]]) -> None:
        self._unsettled -= len(owed)
        for route, key in owed:
            self.deliveries.committed(key)
            self._acknowledge(route, key[2])
