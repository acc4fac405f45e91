"""Where a command reads from: a run directory's database, or a running coordinator's pages.

Owns the choice between the two and every way it can fail, said in one line with its exit code. Shows nothing.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from pydantic import BaseModel, ValidationError

from sentinel.cli.output import ExitCode, fail
from sentinel.incidents.model import Incident, IncidentList
from sentinel.postmortem.text import printable

if TYPE_CHECKING:
    from sentinel.coordinator.snapshot import RunStatus
    from sentinel.coordinator.store import RunRecord
    from sentinel.incidents.events import Event

RUNS_FOLDER = Path("sentinel-runs")
TIMEOUT_SECONDS = 10.0
MAX_REFUSAL_BYTES = 4096


class Source(Protocol):
    """Incidents of one or several runs. ``run_dir`` is None where their files are on another host."""

    @property
    def run_dir(self) -> Path | None:
        """Run directory on this host, if that is what is read."""

    def incidents(self, run_id: str | None) -> IncidentList:
        """Incidents, oldest first; only one run's if ``run_id`` is given."""


def choose(run_dir: Path | None, http: str | None, token: str | None = None) -> Source:
    """``--run-dir`` wins over ``--http`` (which the environment may have set); with neither, the newest run here."""
    if run_dir is None and http is not None:
        return Pages(http.rstrip("/"), token)
    return RunDirectory(run_dir or newest_run())


def newest_run() -> Path:
    """The run directory below ./sentinel-runs that was made last; leaves with a hint if there is none."""
    runs = [path for path in RUNS_FOLDER.iterdir() if path.is_dir()] if RUNS_FOLDER.is_dir() else []
    if not runs:
        fail(f"no runs below ./{RUNS_FOLDER}", "name one with --run-dir DIR, or start one with: sentinel run script.py")
    return max(runs, key=lambda path: (path.stat().st_mtime_ns, path.name))


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run directory on this host."""

    path: Path

    @property
    def run_dir(self) -> Path | None:
        """The directory itself."""
        return self.path

    def incidents(self, run_id: str | None) -> IncidentList:
        """From the run's database. ``run_id`` of the answer is None if the database holds several runs."""
        runs, found = self._read(run_id)
        only = run_id or (runs[0].run_id if len(runs) == 1 else None)
        return IncidentList(run_id=only, incidents=tuple(found))

    def runs(self) -> list[RunRecord]:
        """The runs that the database knows, oldest first."""
        return self._read(None)[0]

    def events(self, run_id: str, since: float = 0.0, until: float = math.inf) -> Iterator[Event]:
        """The event log of one run between two times (unix seconds), in the order received."""
        return (event for _, event in self.logged(run_id, since, until))

    def logged(self, run_id: str, since: float = 0.0, until: float = math.inf) -> Iterator[tuple[float, Event]]:
        """The same with the time at which the coordinator received each event."""
        from sentinel.coordinator.store import IncidentReader, StoreUnreadable

        try:
            with IncidentReader(self.path) as reader:
                yield from ((logged.at, logged.event) for logged in reader.events(run_id, since, until))
        except StoreUnreadable as error:
            fail(str(error), "the run's incidents can be read without its event log: sentinel incidents show")

    def _read(self, run_id: str | None) -> tuple[list[RunRecord], list[Incident]]:
        from sentinel.coordinator.store import IncidentReader, StoreUnreadable

        if not self.path.exists():
            fail(f"no run directory {self.path}", "sentinel run says at its start and end where it is")
        try:
            with IncidentReader(self.path) as reader:
                return reader.runs(), reader.incidents(run_id)
        except StoreUnreadable as error:
            fail(str(error), "if the run reported to a coordinator elsewhere, ask that one: --http URL")


@dataclass(frozen=True, slots=True)
class Pages:
    """A coordinator's HTTP pages, on this host or another."""

    url: str
    token: str | None

    @property
    def run_dir(self) -> Path | None:
        """None: the files may be on another host."""
        return None

    def incidents(self, run_id: str | None) -> IncidentList:
        """From ``/api/v1/incidents``."""
        query = f"?{urllib.parse.urlencode({'run_id': run_id})}" if run_id else ""
        answer = self.get(f"/api/v1/incidents{query}")
        try:
            return IncidentList.model_validate_json(answer)
        except ValidationError:
            self._fail_other_version()

    def status(self) -> list[RunStatus]:
        """From ``/api/v1/status``."""
        from sentinel.coordinator.snapshot import RunStatus

        answer = self.get("/api/v1/status")
        try:
            return [RunStatus.model_validate(run) for run in json.loads(answer)["runs"]]
        except (ValueError, KeyError, TypeError):
            self._fail_other_version()

    def get(self, path: str) -> bytes:
        """Body of one page. Leaves with exit code 4 if nobody answers, 5 if the coordinator refuses."""
        return self._ask(path, None)

    def post(self, path: str, body: BaseModel | None = None) -> bytes:
        """Answer to a request to act. Leaves as ``get`` does; what the coordinator cannot do is said in its own words."""
        return self._ask(path, body.model_dump_json().encode() if body is not None else b"")

    def _ask(self, path: str, body: bytes | None) -> bytes:
        if not self.url.startswith(("http://", "https://")):
            fail(f"{self.url!r} is not an address of pages", "--http http://HOST:PORT", ExitCode.USAGE)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        request = urllib.request.Request(self.url + path, body, headers)  # noqa: S310 - the scheme is checked above
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            self._fail_refused(error.code, error.read(MAX_REFUSAL_BYTES))
        except (OSError, HTTPException) as error:
            cause = getattr(error, "reason", error)
            reason = getattr(cause, "strerror", None) or cause
            fail(
                f"cannot reach coordinator {self.url} ({reason})",
                "is it running? its join.json names the address",
                ExitCode.UNREACHABLE,
            )

    def _fail_other_version(self) -> NoReturn:
        fail(f"{self.url} does not answer as a coordinator of this version", "compare both ends: sentinel version")

    def _fail_refused(self, status: int, body: bytes) -> NoReturn:
        if status in (404, 409) and (said := _refusal(body)):
            fail(said, "sentinel status and sentinel incidents ls show what there is")
        if status in (401, 403):
            fail(
                f"{self.url} refuses (HTTP {status})",
                "give its token: --token, or SENTINEL_HTTP_TOKEN",
                ExitCode.REFUSED,
            )
        fail(f"{self.url} answered with HTTP {status}", "is this a coordinator's address?", ExitCode.UNREACHABLE)


def _refusal(body: bytes) -> str:
    """A coordinator's own words on why it cannot do something; empty if these are none."""
    try:
        said = json.loads(body)
        return printable(f"{said['error']}: {said['detail']}", 200)
    except (ValueError, KeyError, TypeError):
        return ""
