"""Which parts of bundles are fetched from other hosts, and which bundles wait for theirs.

Owns that choice, on the loop's thread: a part is fetched if its bundle's own directory does not hold it, suspects' parts before
others', as far as a bundle's allowance reaches. A bundle waits for a moment, not for ever: one that is committed without a part is
committed again when the part is there.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from sentinel.bundle.commit import PresentPart
from sentinel.bundle.paths import part_directory
from sentinel.coordinator.faults import Faults
from sentinel.coordinator.fetcher import Fetcher, PartKey
from sentinel.coordinator.fetching import Allowance, Asked
from sentinel.coordinator.journal import Post
from sentinel.coordinator.run import Run
from sentinel.coordinator.totals import DumpFailure
from sentinel.wire.codec import encode_command
from sentinel.wire.link import COMMAND_LIFETIME_SECONDS
from sentinel.wire.messages import PartPiece, PartWanted, PartWritten
from sentinel.wire.names import BUNDLES, bundle_id

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 20.0
"""A bundle is committed without the parts that have not come by then."""

SendCommand = Callable[[bytes, bytes], None]
"""Sends a command frame to a route."""
Came = Callable[[Run, str], None]
"""Told, on the loop's thread, that a part of a bundle (by its id) came or will not come."""


class Fetches:
    """``allowance`` is how many bytes of one bundle are fetched at most; ``came`` is told of each end."""

    def __init__(
        self, send: SendCommand, post: Post, faults: Faults, command_key: bytes, allowance: int, came: Came
    ) -> None:
        self._send = send
        self._post = post
        self._command_key = command_key
        self._allowance = allowance
        self._came = came
        self._allowances: dict[tuple[str, str], Allowance] = {}
        self._since: dict[tuple[str, str], float] = {}
        self._open: dict[PartKey, Run] = {}
        self._known: set[PartKey] = set()
        self.fetcher = Fetcher(
            lambda key, node, asked: post(partial(self._ask, key, node, asked)),
            lambda key, error: post(partial(self._ended, key, error)),
            faults,
        )

    @property
    def pending(self) -> int:
        """Parts on their way here."""
        return len(self._open)

    def part_written(self, run: Run, report: PartWritten, root: Path) -> None:
        """A rank wrote its part. If all ranks' parts may be had, this one is fetched at once, while its launcher is there."""
        if not report.error and report.bytes * max(run.tracker.world_size, 1) <= self._allowance:
            part = PresentPart(report.rank, report.node, report.directory)
            self.want(run, (report.attempt, report.round), [part], root)

    def want(self, run: Run, at: tuple[int, int], parts: Iterable[PresentPart], root: Path) -> None:
        """Fetch ``parts`` of the bundle of (attempt, round) in this order: those that ``root`` does not hold, each tried once."""
        bundle = bundle_id(*at)
        for part in parts:
            key = PartKey(run.run_id, bundle, *at, part.rank)
            if part.error or key in self._known or (root / BUNDLES / bundle / part_directory(part.rank)).exists():
                continue
            self._known.add(key)
            self._open[key] = run
            self._since.setdefault((run.run_id, bundle), time.monotonic())
            allowance = self._allowances.setdefault((run.run_id, bundle), Allowance(self._allowance))
            self.fetcher.want(key, part.node, root, allowance)

    def expects(self, run: Run, bundle: str) -> bool:
        """True while a part of this bundle is on its way."""
        return any(key.run_id == run.run_id and key.bundle == bundle for key in self._open)

    def is_worth_waiting(self, run: Run, bundle: str) -> bool:
        """True while a part is on its way and the bundle's patience lasts."""
        since = self._since.get((run.run_id, bundle), 0.0)
        return self.expects(run, bundle) and time.monotonic() - since < PATIENCE_SECONDS

    def take(self, run: Run, piece: PartPiece) -> None:
        """A piece came by a connection of this run."""
        key = PartKey(run.run_id, bundle_id(piece.attempt, piece.round), piece.attempt, piece.round, piece.rank)
        if key in self._open:
            self.fetcher.take(key, piece)

    def _ask(self, key: PartKey, node: int, asked: Asked) -> None:
        run = self._open.get(key)
        routes = [(route.last_at, name) for name, route in run.routes.items() if route.node == node] if run else []
        if not routes:
            return  # it is asked for again, and given up if nobody comes
        expires_at = time.time() + COMMAND_LIFETIME_SECONDS
        where = (asked.file, asked.offset, asked.length, asked.done)
        wanted = PartWanted(secrets.token_hex(8), expires_at, key.attempt, key.round, (key.rank,), *where)
        self._send(max(routes)[1], encode_command(wanted, self._command_key))

    def _ended(self, key: PartKey, error: str) -> None:
        run = self._open.pop(key, None)
        if run is None:
            return
        if error:
            log.warning("the part of rank %d of bundle %s stays on its node: %s", key.rank, key.bundle, error)
            run.totals.dump_failures[DumpFailure.FETCH_ERROR] += 1
        self._came(run, key.bundle)
