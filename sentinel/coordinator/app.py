"""The coordinator as a whole: what is started in which order, and stopped in the reverse.

Owns the wiring and nothing else. ``Coordinator(settings).start()``, then ``join`` for those who connect, then ``stop``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sentinel.coordinator.actions import Actions
from sentinel.coordinator.aftermath import with_word
from sentinel.coordinator.config import (
    CoordinatorSettings,
    is_loopback,
    join_host_port,
    reachable_host,
    split_host_port,
)
from sentinel.coordinator.directories import run_directory
from sentinel.coordinator.faults import Fault, Faults
from sentinel.coordinator.intake import Intake
from sentinel.coordinator.journal import Journal
from sentinel.coordinator.keys import KEY_FILE, ephemeral_keys, persistent_keys
from sentinel.coordinator.limits import raise_open_files
from sentinel.coordinator.restore import restore
from sentinel.coordinator.scrapes import Scrapes
from sentinel.coordinator.server import Server
from sentinel.coordinator.snapshot import (
    RunStatus,
    Snapshot,
    empty_snapshot,
    run_snapshot,
    run_status,
    run_version,
    troubled_ranks,
)
from sentinel.coordinator.sources import RunProgress
from sentinel.coordinator.store import IncidentReader
from sentinel.coordinator.writer import StoreWriter
from sentinel.coordinator.zap import AllowList
from sentinel.incidents.events import Acknowledged, RequestParts
from sentinel.incidents.model import Incident
from sentinel.wire.link import Join, acting_token
from sentinel.wire.names import DATABASE, JOIN_FILE, LOCK_FILE

if TYPE_CHECKING:
    from sentinel.coordinator.http import HttpServer

TELL_SECONDS = 2.0
ANSWER_SECONDS = 2.0  # how long a page waits for the loop before it shows the last known numbers


class RunDirectoryBusy(RuntimeError):
    """Another coordinator works in this run directory."""


class Coordinator:
    """One coordinator. Every error of ``start`` is one line: OSError, or a RuntimeError or ValueError named in its module."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self.run_dir = settings.run_dir.absolute()
        self.http_url: str | None = None
        self._faults = Faults()
        self._last_snapshot = empty_snapshot()
        self._http: HttpServer | None = None
        self._scrapes = Scrapes()
        self._shown = False
        self._undo = contextlib.ExitStack()

    def start(self) -> Self:
        """Open the store, bind, take up earlier runs, serve, and write ``join.json``."""
        self._started = time.monotonic()
        try:
            raise_open_files(self.settings.expected_relays)
            self._claim_run_directory()
            self._open_store()
            self._bind()
            self._build_desk()
            self._take_up_earlier_runs()
            self._serve()
            self._write_join()
        except BaseException:
            self._undo.close()
            raise
        return self

    @property
    def join(self) -> Join:
        """What a launcher needs to connect; a secret."""
        return self._keys.join(self._advertised, http=self.http_url, run_dir=self.run_dir)

    def incidents(self, run_id: str | None = None) -> list[Incident]:
        """Incidents that are on disk, oldest first. Raises StoreUnreadable."""
        with IncidentReader(self.run_dir / DATABASE) as reader:
            return reader.incidents(run_id)

    def snapshot(self) -> Snapshot:
        """Numbers of this moment; the last known ones if the loop does not answer."""
        taken = self._server.ask(self._take_snapshot, ANSWER_SECONDS)
        if taken is not None:
            self._last_snapshot = taken
        return self._last_snapshot

    def status(self, with_ranks: bool = True) -> tuple[RunStatus, ...] | None:
        """Every run with its ranks; None if the loop does not answer."""
        return self._server.ask(
            lambda: tuple(run_status(run, with_ranks=with_ranks) for run in self._intake.runs.values()), ANSWER_SECONDS
        )

    def progress(self, run_id: str, rounds: int) -> RunProgress | None:
        """The last rounds of one run and the ranks to look at; None if there is no such run, or the loop does not answer."""

        def take() -> RunProgress | None:
            run = self._intake.runs.get(run_id)
            if run is None:
                return None
            return RunProgress(run.tracker.world_size, run.progress.rows(rounds), troubled_ranks(run))

        return self._server.ask(take, ANSWER_SECONDS)

    def acknowledge(self, run_id: str, word: Acknowledged) -> Incident | None:
        """Keep a person's word on an incident, of a run that is over too. None if there is no such incident here."""
        now = time.time()
        kept = self._server.ask(lambda: self._intake.acknowledge(run_id, word, now), ANSWER_SECONDS)
        if kept is not None:
            return kept
        with IncidentReader(self.run_dir / DATABASE) as reader:
            incident = reader.incident(word.incident_id, run_id)
        if incident is None:
            return None
        acknowledged, writes = with_word(incident, word, now)
        self._writer.submit(writes, urgent=True)
        return acknowledged

    def dump_now(self, run_id: str) -> RequestParts | None:
        """Let all ranks of a run dump one round to come. None if the run has no rank to ask, or the loop does not answer."""
        return self._server.ask(lambda: self._intake.dump_now(run_id, time.time()), ANSWER_SECONDS)

    def _bundle_root(self, run_id: str, bundle: str) -> Path:
        run = self._intake.runs.get(run_id)
        own = run_directory(self.run_dir, run_id, standalone=self.settings.standalone)
        return own if run is None else run.bundle_roots.get(bundle, own)

    def _versions(self) -> dict[str, str] | None:
        written = self._writer.incidents_written
        return self._server.ask(
            lambda: {run.run_id: f"{run_version(run)}.{written}" for run in self._intake.runs.values()}, ANSWER_SECONDS
        )

    def stop(self, timeout: float = 10.0) -> bool:
        """Judge what is open, commit everything, close. False if ``timeout`` seconds were not enough for all of it.

        A Prometheus that scrapes here gets one more scrape of incidents it has not seen, before ``timeout`` begins to count.
        """
        self.let_scraper_see()
        deadline = time.monotonic() + timeout
        if self._http is not None:
            self._http.stop(min(2.0, 0.2 * timeout))
        drained = self._server.stop(max(0.6 * timeout, 0.1))
        self._actions.close()
        stored = self._writer.close(max(deadline - time.monotonic(), 0.1))
        self._undo.close()
        return drained and stored

    def expect_scraper(self) -> None:
        """A Prometheus was told of this coordinator just now; it has not been here yet."""
        self._scrapes.expect(time.monotonic())

    def let_parts_come(self, timeout: float, tell: Callable[[int, int, int], None]) -> bool:
        """Wait until all parts that lie on other hosts are here, or have failed. False if ``timeout`` seconds were not enough.

        ``tell(parts, have, size)`` is called about every two seconds: how many parts are still to come, and of those under way how
        many bytes are here, of how many.
        """
        fetches, deadline, tell_at = self._actions.fetches, time.monotonic() + timeout, time.monotonic() + TELL_SECONDS
        while fetches.pending and time.monotonic() < deadline:
            if time.monotonic() >= tell_at:
                tell_at += TELL_SECONDS
                tell(fetches.pending, fetches.fetcher.have, fetches.fetcher.size)
            time.sleep(0.02)
        return not fetches.pending

    def let_scraper_see(self) -> None:
        """Wait, once and for at most 20 s, until a Prometheus that scrapes a run's own coordinator has seen every incident."""
        if self._http is not None and self.settings.run_id is not None and not self._shown:
            self._shown = True
            self._scrapes.wait_for_one_with(_incident_count(self.snapshot()))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _claim_run_directory(self) -> None:
        """One coordinator for each run directory, held by a lock that dies with the process."""
        self.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._undo.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryBusy(f"another coordinator works in {self.run_dir}") from None

    def _open_store(self) -> None:
        settings = self.settings
        self._writer = StoreWriter(
            self.run_dir / DATABASE, synchronous=settings.synchronous, healthy_kept=settings.healthy_frames_kept
        )
        self._writer.start()
        self._undo.callback(self._writer.close, 1.0)

    def _bind(self) -> None:
        settings = self.settings
        self._keys = persistent_keys(self.run_dir / KEY_FILE) if settings.standalone else ephemeral_keys()
        self._allowed = AllowList((self._keys.client_public, *settings.client_keys))
        self._server = Server(settings, self._keys, self._allowed, self._faults)
        host, port = split_host_port(self._server.bind().removeprefix("tcp://"))
        self._undo.callback(self._server.stop, 1.0)
        self._advertised = f"tcp://{join_host_port(settings.advertise_host or reachable_host(host), port)}"

    def _build_desk(self) -> None:
        server = self._server
        journal = Journal(self._writer, server.post, server.acknowledge)
        command_key = bytes.fromhex(self._keys.command_key)
        self._actions = Actions(
            journal,
            server.send_command,
            server.post,
            self._faults,
            command_key,
            fetch_bytes=self.settings.fetch_bytes,
            gathers=not self.settings.standalone,
        )
        self._journal = journal
        self._intake = Intake(
            journal,
            self._actions,
            self._faults,
            run_dir=self.run_dir,
            only_run=self.settings.run_id,
            max_runs=self.settings.max_runs,
        )
        self._actions.start()
        self._undo.callback(self._actions.close)

    def _take_up_earlier_runs(self) -> None:
        if self.settings.standalone:
            with IncidentReader(self.run_dir / DATABASE) as reader:
                restore(reader, self._intake, self._journal, self._actions, self._faults, self.run_dir, time.time())

    def _serve(self) -> None:
        if self.settings.http_enabled:
            self._bind_http()
        self._server.start(self._intake)
        if self._http is not None:
            self._start_http(self._http)

    def _bind_http(self) -> None:
        # Imported here: a launcher that serves no pages does not pay for the web libraries.
        from sentinel.coordinator.http import HttpServer

        self._http = HttpServer(self.settings.http_bind)
        host, port = split_host_port(self._http.bind())
        self._undo.callback(self._http.stop, 2.0)
        self.http_url = f"http://{join_host_port(reachable_host(host), port)}"

    def _start_http(self, http: HttpServer) -> None:
        from sentinel.coordinator.access import Access
        from sentinel.coordinator.metrics import new_registry
        from sentinel.coordinator.pages import build_app
        from sentinel.coordinator.sources import Sources

        sources = Sources(
            database=self.run_dir / DATABASE,
            registry=new_registry(self.snapshot),
            status=self.status,
            progress=self.progress,
            versions=self._versions,
            bundle_root=self._bundle_root,
            loop_age=lambda: time.monotonic() - self._server.beat,
            store_failing=lambda: self._writer.failing,
            uptime=lambda: time.monotonic() - self._started,
            acknowledge=self.acknowledge,
            dump_now=self.dump_now,
            scraped=lambda: self._scrapes.note(_incident_count(self._last_snapshot), time.monotonic()),
        )
        token = self.settings.http_token.get_secret_value() if self.settings.http_token else None
        count_fault = partial(self._faults.count, Fault.PAGE)
        acting = (acting_token(self._keys.command_key), *([token] if token else []))
        http.start(Access(build_app(sources), token, self._answered_hosts(token), count_fault, acting))

    def _answered_hosts(self, token: str | None) -> frozenset[str] | None:
        host, _ = split_host_port(self.settings.http_bind)
        return frozenset({host, "localhost", "127.0.0.1", "::1"}) if token is None and is_loopback(host) else None

    def _write_join(self) -> None:
        self.join.write(self.run_dir / JOIN_FILE)

    def _take_snapshot(self) -> Snapshot:
        counts = self._server.counts
        faults: Counter[str] = Counter({fault.value: count for fault, count in self._faults.counts.items()})
        return Snapshot(
            taken_at=time.time(),
            runs=tuple(run_snapshot(run) for run in self._intake.runs.values()),
            rejected=dict(counts.rejected),
            faults=faults + self._writer.faults,
            denied_connections=self._allowed.denied,
            acknowledged=counts.acknowledged,
            undeliverable=counts.undeliverable,
            backlog_rows=self._writer.backlog,
        )


def _incident_count(snapshot: Snapshot) -> int:
    return sum(sum(run.incidents.values()) for run in snapshot.runs)
