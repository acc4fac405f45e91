"""What the coordinator answers over HTTP to programs: metrics, health, target discovery, the JSON API and its changes.

Owns those routes and bodies. Pages for people are ``views.py``; who may ask is checked in ``access.py``, serving is in ``http.py``.
"""

from __future__ import annotations

from typing import Any, Literal

from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sentinel import __version__
from sentinel.coordinator.acting import Acknowledgement, PlannedDump
from sentinel.coordinator.rounds_view import MAX_ROUNDS, RoundsAnswer, rounds_answer
from sentinel.coordinator.snapshot import RankStatus, RunStatus
from sentinel.coordinator.sources import Sources
from sentinel.coordinator.store import IncidentReader, RunRecord, StoreUnreadable
from sentinel.coordinator.stream import ChangeStream
from sentinel.coordinator.views import Views
from sentinel.incidents.events import Acknowledged
from sentinel.incidents.model import IncidentList
from sentinel.wire.names import BUNDLES, bundle_id

STUCK_SECONDS = 5.0
MAX_BODY_BYTES = 16 << 10


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


class RankHealth(_Record):
    """Answer of ``/api/v1/ranks``: the ranks to look at first."""

    schema_version: Literal[1] = 1
    run_id: str
    ranks: tuple[RankStatus, ...]


class Target(_Record):
    """One entry of ``/api/v1/targets``, in the form of Prometheus' http_sd."""

    targets: tuple[str, ...]
    labels: dict[str, str] = {}


class Refusal(_Record):
    """Answer of everything that cannot be answered: a named reason, and what it was about."""

    error: str
    detail: str


def build_app(sources: Sources) -> Starlette:
    """The application without its access checks."""
    api, views, changes = _Api(sources), Views(sources), ChangeStream(sources.versions)
    return Starlette(
        routes=[
            *views.routes(),
            Route("/metrics", api.metrics),
            Route("/healthz", api.health),
            Route("/api/v1/incidents", api.incidents),
            Route("/api/v1/incidents/{id}", api.incident),
            Route("/api/v1/incidents/{id}/ack", api.acknowledge, methods=["POST"]),
            Route("/api/v1/dump", api.dump, methods=["POST"]),
            Route("/api/v1/runs", api.runs),
            Route("/api/v1/status", api.status),
            Route("/api/v1/ranks", api.ranks),
            Route("/api/v1/rounds", api.rounds),
            Route("/api/v1/targets", api.targets),
            Route("/api/v1/events", changes.answer),
        ],
        exception_handlers={
            StoreUnreadable: _store_unreadable,
            BadQuery: _bad_query,
            404: _not_found,
            Exception: _fault,
        },
    )


class BadQuery(ValueError):
    """A query parameter is not what it should be; the text says which."""


class _Api:
    """Endpoints; plain functions, so Starlette runs each on a worker thread and none can hold up the others."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        body = encode(self._sources.registry)
        self._sources.scraped()
        return Response(body, headers={"Content-Type": content_type})

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
        return _refusal(404, "unknown_incident") if found is None else _json(found)

    async def acknowledge(self, request: Request) -> Response:
        run_id, incident_id = _run_id(request), request.path_params["id"]
        try:
            word = Acknowledgement.model_validate_json(await _body(request))
        except ValidationError as error:
            raise BadQuery(str(error.errors(include_url=False, include_input=False)[0]["msg"])) from None
        said = Acknowledged(incident_id, word.by, word.note)
        incident = await run_in_threadpool(self._sources.acknowledge, run_id, said)
        return _refusal(404, "unknown_incident", incident_id) if incident is None else _json(incident)

    def dump(self, request: Request) -> Response:
        run_id = _run_id(request)
        planned = self._sources.dump_now(run_id)
        if planned is None:
            return _refusal(409, "no_ranks", "no rank of this run can be asked")
        bundle = f"{BUNDLES}/{bundle_id(planned.attempt, planned.round)}"
        return _json(
            PlannedDump(
                run_id=run_id, bundle=bundle, attempt=planned.attempt, round=planned.round, ranks=planned.ranks
            ),
            202,
        )

    def runs(self, request: Request) -> Response:
        with IncidentReader(self._sources.database) as reader:
            return _json(RunList(runs=tuple(reader.runs())))

    def status(self, request: Request) -> Response:
        runs = self._sources.status(request.query_params.get("ranks", "true") != "false")
        if runs is None:
            return _refusal(503, "loop_stuck")
        return _json(Status(version=__version__, uptime_seconds=self._sources.uptime(), runs=runs))

    def ranks(self, request: Request) -> Response:
        run_id = _run_id(request)
        progress = self._sources.progress(run_id, 0)
        if progress is None:
            return _refusal(404, "unknown_run", run_id)
        return _json(RankHealth(run_id=run_id, ranks=progress.troubled))

    def rounds(self, request: Request) -> Response:
        run_id = _run_id(request)
        progress = self._sources.progress(run_id, min(_number(request, "last", 120), MAX_ROUNDS))
        if progress is None:
            return _refusal(404, "unknown_run", run_id)
        blocks, first, count = (
            _number(request, "blocks", 64),
            _number(request, "first", 0),
            _number(request, "count", 0),
        )
        answer: RoundsAnswer = rounds_answer(
            run_id, progress.rows, progress.world_size, blocks=blocks, first=first, count=count
        )
        return _json(answer)

    def targets(self, request: Request) -> Response:
        # The name the scraper itself used leads here, whatever address this is bound to.
        host = request.headers.get("host", "")
        return JSONResponse([Target(targets=(host,)).model_dump(mode="json")])


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BadQuery("the body is too long")
    return body


def _run_id(request: Request) -> str:
    run_id = request.query_params.get("run_id")
    if run_id is None:
        raise BadQuery("run_id is needed")
    return run_id


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise BadQuery(f"{name} is not a number of this size")
    return int(text)


def _json(model: BaseModel, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status_code=status, media_type="application/json")


def _refusal(status: int, reason: str, detail: str = "") -> Response:
    return _json(Refusal(error=reason, detail=detail), status)


def _store_unreadable(_request: Request, error: Any) -> Response:
    return _refusal(503, "store_unreadable", str(error))


def _bad_query(_request: Request, error: Any) -> Response:
    return _refusal(400, "bad_query", str(error))


def _not_found(_request: Request, _: Any) -> Response:
    return _refusal(404, "not_found")


def _fault(_: Request, error: Any) -> Response:
    # Starlette raises the error again after this answer; Access counts it there.
    return _refusal(500, "fault", type(error).__name__)
