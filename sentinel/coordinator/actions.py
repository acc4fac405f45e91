"""Doing what the core asks: store an incident, ask ranks for parts, commit a bundle, let ranks go.

Owns turning commands into writes, signed frames and commits. Which socket and which thread do the work is given to it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from sentinel.bundle.commit import BundleRequest, PresentPart, commit
from sentinel.bundle.manifest import Manifest
from sentinel.bundle.reader import Bundle, BundleRefused
from sentinel.coordinator.committer import Committer
from sentinel.coordinator.directories import bundle_root
from sentinel.coordinator.faults import Fault, Faults
from sentinel.coordinator.journal import Journal, Post
from sentinel.coordinator.run import OpenCommand, Run
from sentinel.coordinator.totals import DumpFailure
from sentinel.coordinator.writer import PutIncident
from sentinel.incidents.events import Command, CommitBundle, Release, RequestParts, SaveIncident
from sentinel.wire.codec import encode_command
from sentinel.wire.link import COMMAND_LIFETIME_SECONDS
from sentinel.wire.messages import DumpRequest, Released
from sentinel.wire.names import BUNDLES

SendCommand = Callable[[bytes, bytes], None]
"""Sends a command frame to a route."""


class Actions:
    """The hands of the core. All methods run on the loop's thread; bundles are hashed on a thread of their own."""

    def __init__(self, journal: Journal, send: SendCommand, post: Post, faults: Faults, command_key: bytes) -> None:
        self._journal = journal
        self._send = send
        self._post = post
        self._faults = faults
        self._command_key = command_key
        self._committer = Committer(faults)
        self._committing = 0

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
            return not Bundle.open(self._root(run, request) / BUNDLES / request.id).partial
        except BundleRefused:
            return False

    def _start_commit(self, run: Run, command: CommitBundle, now: float) -> None:
        request = _request(run, command, now)
        self._committing += 1
        root = self._root(run, request)
        self._committer.submit(
            partial(commit, root, request), lambda manifest: self._post(partial(self._committed, run, manifest))
        )

    def _root(self, run: Run, request: BundleRequest) -> Path:
        root = run.bundle_roots[request.id] = bundle_root(run.directory, request)
        return root

    def _committed(self, run: Run, manifest: Manifest | None) -> None:
        self._committing -= 1
        run.totals.bundles += manifest is not None
        if manifest is None:
            run.totals.dump_failures[DumpFailure.COMMIT_ERROR] += 1
        elif not manifest.complete:
            run.totals.dump_failures[DumpFailure.PARTIAL] += 1

    @property
    def committing(self) -> bool:
        """True while a bundle is being hashed or its result has not been noted."""
        return self._committing > 0

    def close(self) -> None:
        """Take no more bundles."""
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
