"""The pages for people: all runs, one run, one incident; and the files they are made of.

Owns what is on each page. Pages are whole without scripts; scripts of our own redraw them when something changes.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from sentinel import __version__
from sentinel.coordinator.kept_bundles import KeptBundle, kept_bundles
from sentinel.coordinator.snapshot import RunStatus
from sentinel.coordinator.sources import Sources
from sentinel.coordinator.store import IncidentReader
from sentinel.incidents.describe import plural, rank_list
from sentinel.incidents.model import Incident, Severity, State
from sentinel.wire.names import REPORT_FILE

MAX_INCIDENTS = 200
MAX_RUNS = 200
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Views:
    """Endpoints; plain functions, so Starlette runs each on a worker thread."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._environment = environment()
        folder = files("sentinel.coordinator") / "static"
        self._files = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}

    def routes(self) -> list[Route]:
        """Every page and file."""
        return [
            Route("/", self.overview),
            Route("/run", self.run),
            Route("/incident", self.incident),
            Route("/report", self.report),
            Route("/static/{name}", self.file),
        ]

    def overview(self, request: Request) -> Response:
        """All runs, and the incidents of all of them."""
        with IncidentReader(self._sources.database) as reader:
            kept, incidents = reader.runs()[: -MAX_RUNS - 1 : -1], reader.incidents()
        live = {run.run_id: run for run in self._sources.status(False) or ()}
        runs = [(record, live.get(record.run_id)) for record in kept]
        runs.sort(key=lambda pair: pair[1] is None or pair[1].ended)
        return self._page("overview.html", runs=runs, incidents=_newest_first(incidents), tally=_tally(incidents))

    def run(self, request: Request) -> Response:
        """One run: its numbers, heat map, curves, ranks, incidents and bundles."""
        run_id = request.query_params.get("id", "")
        with IncidentReader(self._sources.database) as reader:
            record = next((run for run in reader.runs() if run.run_id == run_id), None)
            incidents = reader.incidents(run_id)
        if record is None:
            return self._missing(f"There is no run called {run_id}.")
        progress = self._sources.progress(run_id, 0)
        return self._page(
            "run.html",
            record=record,
            live=self._live(run_id),
            troubled=progress.troubled if progress else (),
            incidents=_newest_first(incidents),
            tally=_tally(incidents),
            bundles=self._bundles(run_id, incidents),
            reported=self._report_of(run_id) is not None,
        )

    def incident(self, request: Request) -> Response:
        """One incident: verdict, evidence, what was kept, what to do next."""
        wanted, run_id = request.query_params.get("id", ""), request.query_params.get("run_id")
        with IncidentReader(self._sources.database) as reader:
            found = reader.incident(wanted, run_id)
        if found is None:
            return self._missing(f"There is no incident {wanted}.")
        bundles = self._bundles(found.run_id, [found])
        directory = self._sources.bundle_root(found.run_id, found.bundle.rpartition("/")[2] if found.bundle else "")
        return self._page(
            "incident.html",
            incident=found,
            bundle=bundles[0] if bundles else None,
            directory=directory,
            reported=self._report_of(found.run_id) is not None,
            here=str(request.base_url).rstrip("/"),
        )

    def report(self, request: Request) -> Response:
        """The report that lies in a run's directory, as it was written: one page without scripts that needs nothing else."""
        path = self._report_of(request.query_params.get("run_id", ""))
        if path is None:
            return self._missing("No report was written for this run yet: sentinel report INCIDENT -o report.html")
        return HTMLResponse(path.read_bytes(), headers={"Content-Security-Policy": REPORT_POLICY})

    def _report_of(self, run_id: str) -> Path | None:
        """Where the report of a known run lies, None if there is none (a link is none)."""
        with IncidentReader(self._sources.database) as reader:
            if run_id not in {run.run_id for run in reader.runs()}:
                return None
        path = self._sources.bundle_root(run_id, "") / REPORT_FILE
        return path if path.is_file() and not path.is_symlink() else None

    def file(self, request: Request) -> Response:
        """A script, a style sheet or a picture of ours."""
        name = request.path_params["name"]
        content, media_type = self._files.get(name), MEDIA_TYPES.get(f".{name.rpartition('.')[2]}")
        if content is None or media_type is None:
            return Response(status_code=404)
        return Response(content, media_type=media_type)

    def _live(self, run_id: str) -> RunStatus | None:
        return next((run for run in self._sources.status(False) or () if run.run_id == run_id), None)

    def _bundles(self, run_id: str, incidents: Sequence[Incident]) -> list[KeptBundle]:
        return kept_bundles(partial(self._sources.bundle_root, run_id), incidents)

    def _missing(self, text: str) -> Response:
        return self._page("missing.html", 404, text=text)

    def _page(self, template: str, status: int = 200, **context: Any) -> Response:
        body = self._environment.get_template(template).render(version=__version__, **context)
        return HTMLResponse(body, status, headers={"Content-Security-Policy": POLICY})


def environment() -> Environment:
    """Templates with every value escaped, and an error for a name that is not there."""
    made = Environment(
        loader=PackageLoader("sentinel.coordinator"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "words": _words,
        "ranks": rank_list,
        "count": plural,
        "bytes": _bytes,
        "number": _number,
        "sentence": _sentence,
        "shell": shlex.quote,
    }
    return made


def _newest_first(incidents: Sequence[Incident]) -> list[Incident]:
    """Open ones before resolved ones, newest first."""
    ordered = sorted(incidents, key=lambda i: (i.state is not State.RESOLVED, i.opened_at), reverse=True)
    return ordered[:MAX_INCIDENTS]


def _tally(incidents: Sequence[Incident]) -> dict[str, int]:
    unresolved = [incident for incident in incidents if incident.state is not State.RESOLVED]
    counts = {severity.value: sum(i.severity is severity for i in unresolved) for severity in Severity}
    return {**counts, "resolved": len(incidents) - len(unresolved), "all": len(incidents)}


def _words(value: str) -> str:
    return str(value).replace("_", " ")


def _sentence(text: str) -> str:
    """With a capital and a full stop; reasons are written to stand inside other sentences too."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
