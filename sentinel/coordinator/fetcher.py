"""A thread that fetches parts of bundles from other hosts, so that writing them never holds up the loop.

Owns the thread and the turns: one part at a time from each node, so that its link carries one stream beside the reports. What a
fetch asks for and writes is ``fetching.py``'s; sending and hearing of the end are given to it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from sentinel.coordinator.faults import Fault, Faults
from sentinel.coordinator.fetching import Allowance, Asked, FetchFailed, PartFetch
from sentinel.wire.messages import PartPiece

R = TypeVar("R")

MAX_AT_ONCE = 64  # nodes; each has at most two megabytes under way
TURN_SECONDS = 0.5  # how often a fetch that hears nothing is looked at


@dataclass(frozen=True, slots=True)
class PartKey:
    """Whose part of which bundle."""

    run_id: str
    bundle: str
    attempt: int
    round: int
    rank: int


Ask = Callable[[PartKey, int, Asked], None]
"""Sends a request for a part's piece to a node. Called on the fetcher's thread."""
Ended = Callable[[PartKey, str], None]
"""Told when a fetch has ended, with one line of error or ''. Called on the fetcher's thread."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    key: PartKey
    node: int
    root: Path
    allowance: Allowance


@dataclass(frozen=True, slots=True)
class _Came:
    key: PartKey
    piece: PartPiece


class Fetcher:
    """Fetches what is wanted, node by node. All methods may be called from any thread."""

    def __init__(self, ask: Ask, ended: Ended, faults: Faults) -> None:
        self._ask = ask
        self._ended = ended
        self._faults = faults
        self._events: SimpleQueue[_Wanted | _Came | None] = SimpleQueue()
        self._waiting: dict[tuple[str, int], deque[_Wanted]] = {}
        self._running: dict[PartKey, tuple[PartFetch, int]] = {}
        self._thread = threading.Thread(target=self._run, name="sentinel-fetch", daemon=True)
        self.have = self.size = 0
        """Bytes of the parts that are being fetched: here, and in all as far as is known."""

    def want(self, key: PartKey, node: int, root: Path, allowance: Allowance) -> None:
        """Fetch a part into the bundles of ``root`` when the node's turn comes."""
        if self._thread.ident is None:
            self._thread.start()
        self._events.put(_Wanted(key, node, root, allowance))

    def take(self, key: PartKey, piece: PartPiece) -> None:
        """A piece came."""
        self._events.put(_Came(key, piece))

    def close(self) -> None:
        """Give up what is not here yet; what came of it is removed."""
        self._events.put(None)
        if self._thread.ident is not None:
            self._thread.join(2.0)

    def _run(self) -> None:
        ended = False
        while not ended:
            try:
                event = self._events.get(timeout=TURN_SECONDS if self._running else None)
                ended = event is None
                self._faults.guard(Fault.FETCH, self._handle, event)
            except Empty:
                pass
            self._faults.guard(Fault.FETCH, self._turn)
        for fetch, _ in self._running.values():
            fetch.abandon()

    def _handle(self, event: _Wanted | _Came | None) -> None:
        match event:
            case _Wanted(key, node):
                self._waiting.setdefault((key.run_id, node), deque()).append(event)
            case _Came(key, piece) if key in self._running:
                fetch, _ = self._running[key]
                self._try(key, partial(fetch.take, piece, time.monotonic()))
                if fetch.finished:
                    self._end(key, "")

    def _turn(self) -> None:
        """Begin what may begin, and ask for what is due."""
        now = time.monotonic()
        busy = {(key.run_id, node) for key, (_, node) in self._running.items()}
        for place, queue in list(self._waiting.items()):
            if place not in busy and len(self._running) < MAX_AT_ONCE:
                wanted = queue.popleft()
                fetch = PartFetch(wanted.root, wanted.key.bundle, wanted.key.rank, wanted.allowance, now)
                self._running[wanted.key] = (fetch, wanted.node)
                if not queue:
                    del self._waiting[place]
        for key, (fetch, node) in list(self._running.items()):
            for asked in self._try(key, partial(fetch.due, now)) or ():
                self._ask(key, node, asked)
        self.have = sum(fetch.have for fetch, _ in self._running.values())
        self.size = sum(fetch.size for fetch, _ in self._running.values())

    def _try(self, key: PartKey, act: Callable[[], R]) -> R | None:
        try:
            return act()
        except (FetchFailed, OSError) as failure:
            self._end(key, str(failure))
            return None

    def _end(self, key: PartKey, error: str) -> None:
        fetch, node = self._running.pop(key)
        fetch.abandon()
        self._ask(key, node, Asked(done=True))
        self._ended(key, error)
