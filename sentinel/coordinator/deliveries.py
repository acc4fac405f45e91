"""Which critical frames were delivered before: at least once on the wire becomes once in the core.

Owns the memory of (run, relay, sequence). A frame is acknowledged only from ``COMMITTED`` on.
"""

from __future__ import annotations

from enum import StrEnum

MAX_REMEMBERED = 200_000
"""Older ones are forgotten; the core and the store's unique index then still take a repeat for what it is."""

Key = tuple[str, str, int]  # run id, relay, sequence


class Delivery(StrEnum):
    """What is known of a critical frame that just came."""

    NEW = "new"
    PENDING = "pending"  # handled, not on disk yet: will be acknowledged when it is
    COMMITTED = "committed"  # on disk: acknowledge again, the first acknowledgement was lost


class Deliveries:
    """Bounded memory of deliveries, oldest forgotten first."""

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._committed: dict[Key, bool] = {}
        self._capacity = capacity

    def of(self, key: Key) -> Delivery:
        """State of this delivery."""
        committed = self._committed.get(key)
        if committed is None:
            return Delivery.NEW
        return Delivery.COMMITTED if committed else Delivery.PENDING

    def handled(self, key: Key) -> None:
        """The core has it; the disk does not."""
        self._remember(key, committed=False)

    def committed(self, key: Key) -> None:
        """The disk has it too."""
        self._remember(key, committed=True)

    def _remember(self, key: Key, *, committed: bool) -> None:
        self._committed[key] = committed
        if len(self._committed) > self._capacity:
            del self._committed[next(iter(self._committed))]
