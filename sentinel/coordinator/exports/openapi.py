"""The HTTP API described for other programs: OpenAPI 3.1, made from the models that answer.

Owns the words about paths and parameters. What the routes do is ``pages.py``; a test holds both equal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from sentinel import __version__
from sentinel.coordinator.acting import Acknowledgement, PlannedDump
from sentinel.coordinator.pages import Health, RankHealth, Refusal, RunList, Status, Target
from sentinel.coordinator.rounds_view import RoundsAnswer
from sentinel.incidents.model import Incident, IncidentList

REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Query:
    """One query parameter."""

    name: str
    description: str
    required: bool = False
    type: str = "string"


@dataclass(frozen=True, slots=True)
class Path:
    """One GET, or a POST that acts. ``model`` answers it, as a list of them if ``many``; text answers have a ``media`` type."""

    path: str
    summary: str
    model: type[BaseModel] | None = None
    many: bool = False
    media: str = "application/json"
    queries: tuple[Query, ...] = ()
    refusals: dict[int, str] = field(default_factory=dict)
    open: bool = False  # no token is asked for
    method: str = "get"
    body: type[BaseModel] | None = None
    status: int = 200


_RUN = Query("run_id", "Only this run.")
_ONE_RUN = Query("run_id", "The run.", required=True)
_STORE = {503: "The database cannot be read: `store_unreadable`."}

PATHS: tuple[Path, ...] = (
    Path("/api/v1/incidents", "Incidents, oldest first.", IncidentList, queries=(_RUN,), refusals=_STORE),
    Path(
        "/api/v1/incidents/{id}",
        "One incident; the newest of that id if several runs have it.",
        Incident,
        queries=(_RUN,),
        refusals={404: "`unknown_incident`", **_STORE},
    ),
    Path(
        "/api/v1/incidents/{id}/ack",
        "Note that a person has seen an incident. The verdict stays as it is.",
        Incident,
        queries=(_ONE_RUN,),
        refusals={400: "`bad_query`", 404: "`unknown_incident`", 401: "`token_required`", **_STORE},
        method="post",
        body=Acknowledgement,
    ),
    Path(
        "/api/v1/dump",
        "Let every rank of a run write its part of one round to come.",
        PlannedDump,
        queries=(_ONE_RUN,),
        refusals={400: "`bad_query`", 401: "`token_required`", 409: "`no_ranks`"},
        method="post",
        status=202,
    ),
    Path("/api/v1/runs", "Every run that the database knows, oldest first.", RunList, refusals=_STORE),
    Path(
        "/api/v1/status",
        "The runs that are being watched, as of now.",
        Status,
        queries=(Query("ranks", "`false` leaves out the list of ranks.", type="boolean"),),
        refusals={503: "The loop does not answer: `loop_stuck`."},
    ),
    Path(
        "/api/v1/ranks",
        "The ranks of a run to look at first: silent, disabled, or behind.",
        RankHealth,
        queries=(_ONE_RUN,),
        refusals={400: "`bad_query`", 404: "`unknown_run`"},
    ),
    Path(
        "/api/v1/rounds",
        "The last rounds of a run: curves, and what each block of ranks saw.",
        RoundsAnswer,
        queries=(
            _ONE_RUN,
            Query("last", "How many rounds, at most 512.", type="integer"),
            Query("blocks", "Into how many blocks the ranks are summed up, at most 128.", type="integer"),
            Query("first", "First rank shown.", type="integer"),
            Query("count", "How many ranks are shown; 0: all from `first` on.", type="integer"),
        ),
        refusals={400: "`bad_query`", 404: "`unknown_run`"},
    ),
    Path("/api/v1/targets", "This coordinator as a target for Prometheus' http_sd.", Target, many=True),
    Path(
        "/api/v1/events",
        'Server-sent events: `change` with `{"runs": [...]}`, the runs that something happened to.',
        media="text/event-stream",
        refusals={503: "`too_many_streams`"},
    ),
    Path("/metrics", "Metrics for Prometheus; OpenMetrics where it is asked for.", media="text/plain"),
    Path(
        "/healthz",
        "Whether the loop turns and the disk takes commits.",
        Health,
        open=True,
        refusals={503: "Not ok; `status` is the reason."},
    ),
)


def openapi() -> str:
    """The description as JSON text."""
    models = sorted(
        {p.model for p in PATHS if p.model} | {p.body for p in PATHS if p.body} | {Refusal}, key=lambda m: m.__name__
    )
    _, schemas = models_json_schema([(model, "serialization") for model in models], ref_template=REF)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Sentinel coordinator",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Reading, and two requests that act, which ask for a token in the header. "
            "Numbers that are NaN or infinite come as the strings NaN, Infinity and -Infinity.",
        },
        "servers": [{"url": "http://127.0.0.1:9470"}],
        "security": [{"token": []}, {"session": []}, {}],
        "paths": {path.path: {path.method: _operation(path)} for path in PATHS},
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "sentinel_session"},
            },
        },
    }
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _operation(path: Path) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": path.summary,
        "operationId": path.path.strip("/").replace("/", "_").replace("{", "by_").replace("}", ""),
        "parameters": _parameters(path),
        "responses": {
            str(path.status): {"description": path.summary, "content": {path.media: {"schema": _schema(path)}}}
        },
    }
    for status, words in path.refusals.items():
        model = path.model if path.open and path.model else Refusal
        content = {"application/json": {"schema": {"$ref": REF.format(model=model.__name__)}}}
        operation["responses"][str(status)] = {"description": words, "content": content}
    if path.body is not None:
        schema = {"$ref": REF.format(model=path.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if path.open:
        operation["security"] = [{}]
    elif path.method == "post":
        operation["security"] = [{"token": []}]
    return operation


def _parameters(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if "{id}" in path.path:
        found.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string"}})
    for query in path.queries:
        found.append(
            {
                "name": query.name,
                "in": "query",
                "required": query.required,
                "description": query.description,
                "schema": {"type": query.type},
            }
        )
    return found


def _schema(path: Path) -> dict[str, Any]:
    if path.model is None:
        return {"type": "string"}
    one = {"$ref": REF.format(model=path.model.__name__)}
    return {"type": "array", "items": one} if path.many else one
