"""What the pages answer: metrics, health, the JSON API and the index.

Owns routes and bodies. Reads the database and snapshots; who may ask is checked in ``access.py``, serving is in ``http.py``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from sentinel import __version__
from sentinel.coordinator.snapshot import RunStatus
from sentinel.coordinator.store import IncidentReader, RunRecord, StoreUnreadable
from sentinel.incidents.model import IncidentList

STUCK_SECONDS = 5.0
MAX_INDEX_INCIDENTS = 500


@dataclass(frozen=True, slots=True)
class Sources:
    """Where answers come from. ``status`` is None-valued if the loop did not answer in time; ages are in seconds."""

    database: Path
    registry: CollectorRegistry
    status: Callable[[bool], tuple[RunStatus, ...] | None]
    loop_age: Callable[[], float]
    store_failing: Callable[[], bool]
    uptime: Callable[[], float]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Health(_Record):
    """Answer of ``/healthz``; ``status`` is the reason when it is not ok."""

    status: Literal["ok", "loop_stuck", "store_failing"]
    version: str
    uptime_seconds: float
    loop_age_seconds: float


class RunList(_Record):
    """Answer of ``/api/v1/runs``."""

    schema_version: Literal[1] = 1
    runs: tuple[RunRecord, ...]


class Status(_Record):
    """Answer of ``/api/v1/status``."""

    schema_version: Literal[1] = 1
    version: str
    uptime_seconds: float
    runs: tuple[RunStatus, ...]


def build_app(sources: Sources) -> Starlette:
    """The application without its access checks."""
    pages = _Pages(sources)
    return Starlette(
        routes=[
            Route("/", pages.index),
            Route("/metrics", pages.metrics),
            Route("/healthz", pages.health),
            Route("/api/v1/incidents", pages.incidents),
            Route("/api/v1/incidents/{id}", pages.incident),
            Route("/api/v1/runs", pages.runs),
            Route("/api/v1/status", pages.status),
        ],
        exception_handlers={StoreUnreadable: _store_unreadable, 404: _not_found, Exception: _fault},
    )


class _Pages:
    """Endpoints; plain functions, so Starlette runs each on a worker thread and none can hold up the others."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        environment = Environment(
            loader=PackageLoader("sentinel.coordinator"),
            autoescape=select_autoescape(default=True),
            undefined=StrictUndefined,
        )
        self._index = environment.get_template("index.html")

    def index(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        with IncidentReader(self._sources.database) as reader:
            incidents = reader.incidents()[: -MAX_INDEX_INCIDENTS - 1 : -1]
        policy = f"default-src 'none'; style-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        return HTMLResponse(
            self._index.render(incidents=incidents, nonce=nonce), headers={"Content-Security-Policy": policy}
        )

    def metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._sources.registry), headers={"Content-Type": content_type})

    def health(self, request: Request) -> Response:
        age = self._sources.loop_age()
        stored: Literal["ok", "store_failing"] = "store_failing" if self._sources.store_failing() else "ok"
        health = Health(
            status=stored if age < STUCK_SECONDS else "loop_stuck",
            version=__version__,
            uptime_seconds=self._sources.uptime(),
            loop_age_seconds=age,
        )
        return _json(health, 200 if health.status == "ok" else 503)

    def incidents(self, request: Request) -> Response:
        run_id = request.query_params.get("run_id")
        with IncidentReader(self._sources.database) as reader:
            return _json(IncidentList(run_id=run_id, incidents=tuple(reader.incidents(run_id))))

    def incident(self, request: Request) -> Response:
        with IncidentReader(self._sources.database) as reader:
            found = reader.incident(request.path_params["id"], request.query_params.get("run_id"))
        return _error(404, "unknown_incident") if found is None else _json(found)

    def runs(self, request: Request) -> Response:
        with IncidentReader(self._sources.database) as reader:
            return _json(RunList(runs=tuple(reader.runs())))

    def status(self, request: Request) -> Response:
        runs = self._sources.status(request.query_params.get("ranks", "true") != "false")
        if runs is None:
            return _error(503, "loop_stuck")
        return _json(Status(version=__version__, uptime_seconds=self._sources.uptime(), runs=runs))


def _json(model: BaseModel, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status_code=status, media_type="application/json")


def _error(status: int, reason: str, detail: str = "") -> Response:
    return JSONResponse({"error": reason, "detail": detail}, status_code=status)


def _store_unreadable(_request: Request, error: Any) -> Response:
    return _error(503, "store_unreadable", str(error))


def _not_found(_request: Request, _: Any) -> Response:
    return _error(404, "not_found")


def _fault(_: Request, error: Any) -> Response:
    # Starlette raises the error again after this answer; Access counts it there.
    return _error(500, "fault", type(error).__name__)
