"""Reading ``sentinel.db``: runs, incidents and the event log, from any process, while a coordinator writes or after it ended.

Owns the read side only; rows are written by ``writer.py``. Rows are decoded here into the core's own types, so that a
post-mortem can feed the log to the very same ``Tracker``.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from sentinel.coordinator.schema import StoreUnreadable, open_for_reading
from sentinel.incidents.events import Acknowledged, Event, Expect, Received, RunEnded, Tick
from sentinel.incidents.model import Incident, utc
from sentinel.wire.codec import FrameRefused, decode_reports
from sentinel.wire.names import DATABASE

__all__ = ["IncidentReader", "LoggedEvent", "RunRecord", "StoreUnreadable", "with_ticks"]

TICK_SECONDS = 0.1
MAX_TICKS_PER_GAP = 1200


class RunRecord(BaseModel):
    """One run as the database knows it. ``ended_at`` is None while it goes on (or if the coordinator was killed)."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    run_id: str
    started_at: datetime
    ended_at: datetime | None
    world_size: int
    incidents: int
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One entry of the event log; ``at`` is when the coordinator received it (unix seconds)."""

    at: float
    event: Event


class IncidentReader:
    """Read-only view of one database, given as the file or as the run directory that holds it.

    Not for sharing between threads. Every method raises StoreUnreadable if the file turns out to be damaged.
    """

    def __init__(self, path: Path | str) -> None:
        """Open the database. Raises StoreUnreadable: no such file, not a database of ours, or a newer schema."""
        path = Path(path)
        self.path = path / DATABASE if path.is_dir() else path
        self._connection = open_for_reading(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the file."""
        self._connection.close()

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first."""
        rows = self._rows(
            "SELECT run_id, started_at, ended_at, world_size,"
            " (SELECT count(*) FROM incidents i WHERE i.run_id = r.run_id) FROM runs r ORDER BY started_at, run_id"
        )
        return [
            RunRecord(
                run_id=run_id,
                started_at=utc(started),
                ended_at=None if ended is None else utc(ended),
                world_size=world_size,
                incidents=incidents,
                counts=self._counts(run_id),
            )
            for run_id, started, ended, world_size, incidents in rows
        ]

    def incidents(self, run_id: str | None = None) -> list[Incident]:
        """Newest state of every incident (of one run, or of all), oldest first."""
        where, arguments = ("", ()) if run_id is None else (" WHERE run_id = ?", (run_id,))
        rows = self._rows(f"SELECT body FROM incidents{where} ORDER BY opened_at, id", arguments)  # noqa: S608 - constants
        return [self._incident(body) for (body,) in rows]

    def incident(self, incident_id: str, run_id: str | None = None) -> Incident | None:
        """One incident by its id; the newest one if several runs have that id and none is named. None if there is none."""
        found = [i for i in self.incidents(run_id) if i.id == incident_id]
        return found[-1] if found else None

    def events(self, run_id: str, since: float = 0.0, until: float = math.inf) -> Iterator[LoggedEvent]:
        """The event log of a run, in the order received, between two times (unix seconds).

        Frames of another protocol version are passed over.
        """
        rows = self._rows(
            "SELECT received_at, what, body FROM events WHERE run_id = ? AND received_at BETWEEN ? AND ? ORDER BY id",
            (run_id, since, until),
        )
        for at, what, body in rows:
            for event in _events(what, body):
                yield LoggedEvent(at, event)

    def deliveries(self, run_id: str) -> Iterator[tuple[str, int]]:
        """(relay, sequence) of every critical frame of a run that was committed, oldest first."""
        yield from self._rows(
            "SELECT relay, sequence FROM events WHERE run_id = ? AND what = 'critical' ORDER BY id", (run_id,)
        )

    def owner(self, run_id: str) -> str:
        """The CURVE public key that first spoke for a run, or an empty string."""
        rows = list(self._rows("SELECT owner FROM runs WHERE run_id = ?", (run_id,)))
        return str(rows[0][0]) if rows else ""

    def _counts(self, run_id: str) -> dict[str, int]:
        return dict(self._rows("SELECT name, value FROM counts WHERE run_id = ? ORDER BY name", (run_id,)))

    def _incident(self, body: str) -> Incident:
        try:
            return Incident.model_validate_json(body)
        except ValidationError as error:
            raise StoreUnreadable(f"{self.path} holds an incident of another version: {error.title}") from error

    def _rows(self, query: str, arguments: tuple[str | float, ...] = ()) -> Iterator[Any]:
        try:
            yield from self._connection.execute(query, arguments)
        except sqlite3.Error as error:
            raise StoreUnreadable(f"{self.path} cannot be read: {error}") from error


def with_ticks(log: Iterable[LoggedEvent], interval: float = TICK_SECONDS) -> Iterator[LoggedEvent]:
    """The log with the passing of time put back in: a Tick every ``interval`` seconds of each gap, as the coordinator had them.

    A gap of more than two minutes gets its first ticks and one at its end; deadlines are far shorter.
    """
    last: float | None = None
    for entry in log:
        if last is not None and entry.at > last:
            count = min(int((entry.at - last) / interval), MAX_TICKS_PER_GAP)
            yield from (LoggedEvent(last + n * interval, Tick()) for n in range(1, count + 1))
            yield LoggedEvent(entry.at, Tick())
        last = entry.at
        yield entry


def _events(what: str, body: bytes) -> list[Event]:
    if what == "expect":
        return [Expect(int(body))]
    if what == "ended":
        return [RunEnded()]
    if what == "acknowledged":
        return [Acknowledged(*json.loads(body))]
    try:
        return [Received(report) for report in decode_reports(body)]
    except FrameRefused:
        return []
