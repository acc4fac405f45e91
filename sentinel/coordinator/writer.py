"""Writing ``sentinel.db``: one thread, one connection, one commit for all that waits.

Owns durability: ``done`` of a submission is called only once its rows are on disk. Reading is in ``store.py``. A disk that
refuses is retried until it accepts (nothing is acknowledged meanwhile); a row that can never be stored is dropped and counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sentinel.coordinator.schema import open_for_writing
from sentinel.incidents.model import Incident

log = logging.getLogger(__name__)

GROUP_SECONDS = 0.2  # how long writes that nobody waits for are gathered into one commit
RETRY_SECONDS = (0.1, 0.5, 2.0, 5.0)
TRIMMED = "healthy_frames_trimmed"  # the count that says how much of the log is gone


@dataclass(frozen=True, slots=True)
class LogFrame:
    """A report frame as it came. Critical ones are kept for good, the others up to a cap."""

    run_id: str
    received_at: float
    relay: str
    sequence: int
    critical: bool
    frame: bytes


@dataclass(frozen=True, slots=True)
class LogExpect:
    """The world size the run was told of."""

    run_id: str
    received_at: float
    world_size: int


@dataclass(frozen=True, slots=True)
class LogAcknowledged:
    """A person's word on an incident."""

    run_id: str
    received_at: float
    incident_id: str
    by: str
    note: str


@dataclass(frozen=True, slots=True)
class LogEnded:
    """No more reports of this run."""

    run_id: str
    received_at: float


@dataclass(frozen=True, slots=True)
class PutRun:
    """A run was first heard of. ``owner`` is the public key that spoke for it."""

    run_id: str
    started_at: float
    owner: str


@dataclass(frozen=True, slots=True)
class PutIncident:
    """The newest state of an incident."""

    incident: Incident


@dataclass(frozen=True, slots=True)
class PutCounts:
    """Newest totals of a run, by name."""

    run_id: str
    counts: Mapping[str, int]


Write = LogFrame | LogExpect | LogAcknowledged | LogEnded | PutRun | PutIncident | PutCounts


@dataclass(frozen=True, slots=True)
class _Submission:
    writes: tuple[Write, ...]
    done: Callable[[], None] | None
    urgent: bool


class StoreWriter:
    """Queue in front of the database. ``submit`` never blocks on the disk and may be called from any thread."""

    def __init__(
        self, path: Path, *, synchronous: Literal["full", "normal"] = "full", healthy_kept: int = 100_000
    ) -> None:
        self.path = path
        self.faults: Counter[str] = Counter()
        self.failing = False  # the last commit was refused and is being tried again
        self.incidents_written = 0  # a page that was told of a change must find it on disk
        self._synchronous: Literal["full", "normal"] = synchronous
        self._healthy_kept = healthy_kept
        self._healthy: Counter[str] = Counter()  # healthy frames in the log, by run
        self._waiting: list[_Submission] = []
        self._backlog = 0
        self._wake = threading.Condition()
        self._closing = False
        self._rolled_back = False  # the counts in _healthy may include rows that were taken back
        self._thread = threading.Thread(target=self._run, name="sentinel-store", daemon=True)

    def start(self) -> None:
        """Open (and migrate) the database, then start writing. Raises StoreUnreadable."""
        self._connection = open_for_writing(self.path, self._synchronous)
        self._count_healthy()
        self._thread.start()

    def submit(self, writes: Sequence[Write], done: Callable[[], None] | None = None, *, urgent: bool = False) -> None:
        """Queue ``writes`` for one transaction. ``done`` runs on the writer's thread after the commit; it must not block."""
        with self._wake:
            self._waiting.append(_Submission(tuple(writes), done, urgent or done is not None))
            self._backlog += len(writes)
            self._wake.notify()

    @property
    def backlog(self) -> int:
        """Rows that are not on disk yet."""
        return self._backlog

    def close(self, timeout: float) -> bool:
        """Commit what waits, then close. False if ``timeout`` seconds were not enough (the rest is lost)."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                self._commit_until_accepted(batch)
        finally:
            self._leave_one_file()

    def _leave_one_file(self) -> None:
        """Close; a finished run is one plain file that can be read from anywhere, unless somebody reads it right now."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA busy_timeout = 200")
            self._connection.execute("PRAGMA journal_mode = DELETE")
        self._connection.close()

    def _next_batch(self) -> list[_Submission]:
        """What waits now, after gathering a moment if nobody is waiting for it. Empty: closed and nothing left."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closing)
            self._wake.wait_for(lambda: self._closing or any(s.urgent for s in self._waiting), GROUP_SECONDS)
            batch, self._waiting = self._waiting, []
            return batch

    def _commit_until_accepted(self, batch: list[_Submission]) -> None:
        failures = 0
        while not self._commit(batch):
            self.failing = True
            self.faults["store_write"] += 1
            with self._wake:
                if self._closing and failures >= len(RETRY_SECONDS):
                    log.error("incident database %s does not accept writes: the last reports are lost", self.path)
                    return
            time.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
            failures += 1
        self.failing = False
        self.incidents_written += sum(isinstance(write, PutIncident) for s in batch for write in s.writes)
        with self._wake:
            self._backlog -= sum(len(s.writes) for s in batch)
        for submission in batch:
            if submission.done is not None:
                submission.done()

    def _commit(self, batch: list[_Submission]) -> bool:
        """True once every row that can be stored is on disk."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            if self._rolled_back:
                self._count_healthy()
            for submission in batch:
                for write in submission.writes:
                    self._apply(write)
            self._trim()
            self._connection.execute("COMMIT")
        except (
            sqlite3.Error
        ) as error:  # disk full, I/O error, locked: may pass; a damaged file until somebody repairs it
            log.warning("incident database %s: %s (will retry)", self.path, error)
            self._roll_back()
            return False
        return True

    def _roll_back(self) -> None:
        self._rolled_back = True
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _count_healthy(self) -> None:
        rows = self._connection.execute("SELECT run_id, count(*) FROM events WHERE what = 'sample' GROUP BY run_id")
        self._healthy = Counter(dict(rows.fetchall()))
        self._rolled_back = False

    def _apply(self, write: Write) -> None:
        try:
            self._execute(write)
        except (
            sqlite3.IntegrityError,
            sqlite3.DataError,
            sqlite3.ProgrammingError,
            OverflowError,
            UnicodeError,
        ) as error:
            self.faults["store_row"] += 1
            log.warning("incident database: a %s cannot be stored: %s", type(write).__name__, error)

    def _execute(self, write: Write) -> None:
        match write:
            case LogFrame():
                self._log_frame(write)
            case LogExpect():
                self._log(write.run_id, write.received_at, "expect", str(write.world_size).encode())
                self._connection.execute(
                    "UPDATE runs SET world_size = ? WHERE run_id = ?", (write.world_size, write.run_id)
                )
            case LogAcknowledged():
                word = json.dumps([write.incident_id, write.by, write.note]).encode()
                self._log(write.run_id, write.received_at, "acknowledged", word)
            case LogEnded():
                self._log(write.run_id, write.received_at, "ended", b"")
                self._connection.execute(
                    "UPDATE runs SET ended_at = ? WHERE run_id = ?", (write.received_at, write.run_id)
                )
            case PutRun():
                self._connection.execute(
                    "INSERT INTO runs (run_id, started_at, owner) VALUES (?, ?, ?)"
                    " ON CONFLICT (run_id) DO UPDATE SET ended_at = NULL",
                    (write.run_id, write.started_at, write.owner),
                )
            case PutIncident():
                self._put_incident(write.incident)
            case PutCounts():
                rows = [(write.run_id, name, value) for name, value in write.counts.items()]
                self._connection.executemany("INSERT OR REPLACE INTO counts VALUES (?, ?, ?)", rows)

    def _log(self, run_id: str, received_at: float, what: str, body: bytes) -> None:
        self._connection.execute(
            "INSERT INTO events (run_id, received_at, what, body) VALUES (?, ?, ?, ?)",
            (run_id, received_at, what, body),
        )

    def _log_frame(self, write: LogFrame) -> None:
        what = "critical" if write.critical else "sample"
        # A critical frame that is already there was delivered twice: the first copy stands.
        self._connection.execute(
            "INSERT OR IGNORE INTO events (run_id, received_at, what, relay, sequence, body) VALUES (?, ?, ?, ?, ?, ?)",
            (write.run_id, write.received_at, what, write.relay, write.sequence, write.frame),
        )
        if not write.critical:
            self._healthy[write.run_id] += 1

    def _put_incident(self, incident: Incident) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO incidents (run_id, id, kind, severity, state, opened_at, body)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                incident.run_id,
                incident.id,
                incident.kind.value,
                incident.severity.value,
                incident.state.value,
                incident.opened_at.isoformat(),
                incident.model_dump_json(),
            ),
        )

    def _trim(self) -> None:
        """Drop the oldest healthy frames of runs that are over their cap by a tenth, so that trimming is rare."""
        slack = self._healthy_kept // 10 + 64
        for run_id, held in self._healthy.items():
            if held > self._healthy_kept + slack:
                self._drop_oldest(run_id, held - self._healthy_kept)

    def _drop_oldest(self, run_id: str, number: int) -> None:
        self._connection.execute(
            "DELETE FROM events WHERE id IN"
            " (SELECT id FROM events WHERE run_id = ? AND what = 'sample' ORDER BY id LIMIT ?)",
            (run_id, number),
        )
        self._connection.execute(
            "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT (run_id, name) DO UPDATE SET value = value + excluded.value",
            (run_id, TRIMMED, number),
        )
        self._healthy[run_id] -= number
