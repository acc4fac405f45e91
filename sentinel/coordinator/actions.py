"""Doing what the core asks: store an incident, ask ranks for parts, commit a bundle, let ranks go.

Owns turning commands into writes, signed frames and commits. Which socket and which thread do the work is given to it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sentinel.bundle.commit import BundleRequest, PresentPart, commit
from sentinel.bundle.manifest import Manifest
from sentinel.bundle.reader import Bundle, BundleRefused
from sentinel.coordinator.committer import Committer
from sentinel.coordinator.directories import bundle_root
from sentinel.coordinator.faults import Fault, Faults
from sentinel.coordinator.fetches import Fetches, SendCommand
from sentinel.coordinator.journal import Journal, Post
from sentinel.coordinator.run import OpenCommand, Run
from sentinel.coordinator.totals import DumpFailure
from sentinel.coordinator.writer import PutIncident
from sentinel.incidents.events import Command, CommitBundle, Release, RequestParts, SaveIncident
from sentinel.wire.codec import encode_command
from sentinel.wire.link import COMMAND_LIFETIME_SECONDS
from sentinel.wire.messages import DumpRequest, PartWritten, Released
from sentinel.wire.names import BUNDLES, bundle_id


class Actions:
    """The hands of the core. All methods run on the loop's thread; bundles are hashed, and parts fetched, on threads of their own.

    ``fetch_bytes`` of one bundle are fetched from other hosts at most. ``gathers``: bundles always lie in the run's own directory,
    though its parts may be elsewhere on this host too.
    """

    def __init__(
        self,
        journal: Journal,
        send: SendCommand,
        post: Post,
        faults: Faults,
        command_key: bytes,
        *,
        fetch_bytes: int = 0,
        gathers: bool = False,
    ) -> None:
        self._journal = journal
        self._send = send
        self._post = post
        self._faults = faults
        self._command_key = command_key
        self._committer = Committer(faults)
        self._committing = 0
        self._gathers = gathers
        self._hurried = False
        self._waiting: dict[tuple[str, str], tuple[Run, CommitBundle]] = {}  # for parts from other hosts
        self._again: dict[tuple[str, str], tuple[Run, CommitBundle]] = {}  # committed without such parts
        self.fetches = Fetches(send, post, faults, command_key, fetch_bytes, self._part_came)

    def start(self) -> None:
        """Be ready to commit bundles."""
        self._committer.start()

    def carry_out(self, run: Run, commands: Sequence[Command], now: float) -> None:
        """Do ``commands`` in order; one that fails is counted and does not stop the next."""
        for command in commands:
            self._faults.guard(Fault.COMMAND, self._one, run, command, now)

    def _one(self, run: Run, command: Command, now: float) -> None:
        match command:
            case SaveIncident(incident):
                self._journal.write(PutIncident(incident))
            case RequestParts(attempt, round_, ranks):
                expires_at = now + COMMAND_LIFETIME_SECONDS
                self._broadcast(run, DumpRequest(secrets.token_hex(8), expires_at, attempt, round_, ranks))
            case Release(attempt, ranks):
                expires_at = now + COMMAND_LIFETIME_SECONDS
                self._broadcast(run, Released(secrets.token_hex(8), expires_at, attempt, ranks))
            case CommitBundle():
                self._start_commit(run, command, now)

    def _broadcast(self, run: Run, command: DumpRequest | Released) -> None:
        frame = encode_command(command, self._command_key)
        run.commands.append(OpenCommand(command.expires_at, frame))
        for route in list(run.routes):
            self._send(route, frame)

    def repeat_open_commands(self, run: Run, route: bytes, now: float) -> None:
        """Give a relay that just (re)connected the commands it may have missed; ranks know a repeat by its id."""
        for frame in run.open_commands(now):
            self._send(route, frame)

    def is_committed(self, run: Run, command: CommitBundle) -> bool:
        """True if the bundle's manifest is on disk and says that nothing is missing."""
        request = _request(run, command, 0.0)
        try:
            return not Bundle.open(self._root(run, request.id, request.parts) / BUNDLES / request.id).partial
        except BundleRefused:
            return False

    def part_written(self, run: Run, report: PartWritten) -> None:
        """A rank wrote its part; it is fetched if it lies elsewhere."""
        part = PresentPart(report.rank, report.node, report.directory, report.error)
        root = self._root(run, bundle_id(report.attempt, report.round), (part,))
        self.fetches.part_written(run, report, root)

    def tick(self, now: float) -> None:
        """Commit what has waited for its parts long enough."""
        for place, (run, command) in list(self._waiting.items()):
            if self._hurried or not self.fetches.is_worth_waiting(run, command.bundle):
                del self._waiting[place]
                self._commit(run, command, now)

    def hurry(self) -> None:
        """The coordinator stops: wait for no more parts."""
        self._hurried = True

    def _start_commit(self, run: Run, command: CommitBundle, now: float) -> None:
        """Ask for parts on other hosts, suspects' first, and commit when they are here or have taken too long."""
        request = _request(run, command, now)
        suspects = {rank for i in command.incidents for rank in run.tracker.incidents[i].suspect_ranks}
        parts = sorted(request.parts, key=lambda part: (part.rank not in suspects, part.rank))
        self.fetches.want(run, (command.attempt, command.round), parts, self._root(run, request.id, request.parts))
        self._waiting[run.run_id, command.bundle] = (run, command)
        self.tick(now)

    def _part_came(self, run: Run, bundle: str) -> None:
        now = time.time()
        self.tick(now)
        place = (run.run_id, bundle)
        if place in self._again and not self.fetches.expects(run, bundle):
            self._commit(*self._again.pop(place), now, again=True)

    def _commit(self, run: Run, command: CommitBundle, now: float, *, again: bool = False) -> None:
        request = _request(run, command, now)
        if self.fetches.expects(run, command.bundle):
            self._again[run.run_id, command.bundle] = (run, command)
        self._committing += 1
        done = partial(self._committed, run, again)
        self._committer.submit(
            partial(commit, self._root(run, request.id, request.parts), request),
            lambda manifest: self._post(partial(done, manifest)),
        )

    def _root(self, run: Run, bundle: str, parts: Sequence[PresentPart]) -> Path:
        root = run.directory if self._gathers else bundle_root(run.directory, bundle, parts)
        run.bundle_roots[bundle] = root
        return root

    def _committed(self, run: Run, again: bool, manifest: Manifest | None) -> None:
        self._committing -= 1
        if again and manifest is not None:
            return  # it was counted the first time
        run.totals.bundles += manifest is not None
        if manifest is None:
            run.totals.dump_failures[DumpFailure.COMMIT_ERROR] += 1
        elif not manifest.complete:
            run.totals.dump_failures[DumpFailure.PARTIAL] += 1

    @property
    def committing(self) -> bool:
        """True while a bundle waits, is being hashed, or its result has not been noted."""
        return self._committing > 0 or bool(self._waiting)

    def close(self) -> None:
        """Take no more bundles."""
        self.fetches.fetcher.close()
        self._committer.close()


def _request(run: Run, command: CommitBundle, now: float) -> BundleRequest:
    return BundleRequest(
        id=command.bundle,
        run_id=run.run_id,
        attempt=command.attempt,
        round=command.round,
        step=command.step,
        world_size=command.world_size,
        incidents=command.incidents,
        parts=tuple(PresentPart(*part) for part in command.present),
        missing=command.missing,
        committed_at=now,
    )
