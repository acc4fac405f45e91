"""The API's description: every route is in it, and what a coordinator answers is what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from relay_client import RelayClient, fault_of, hello
from starlette.routing import Route

from sentinel.coordinator.app import Coordinator
from sentinel.coordinator.config import CoordinatorSettings
from sentinel.coordinator.exports.openapi import PATHS
from sentinel.coordinator.pages import build_app
from sentinel.coordinator.sources import Sources
from sentinel.wire.link import acting_token

DOCUMENT = json.loads((Path(__file__).parents[3] / "deploy" / "openapi.json").read_text())


def test_every_route_for_programs_is_described() -> None:
    """The routes below /api, /metrics and /healthz are exactly the described ones."""
    sources = Sources(**dict.fromkeys(Sources.__dataclass_fields__))  # type: ignore[arg-type]
    routes = {route.path for route in build_app(sources).routes if isinstance(route, Route)}
    described = {path for path in routes if path.startswith("/api/") or path in ("/metrics", "/healthz")}
    assert described == set(DOCUMENT["paths"]) == {path.path for path in PATHS}


def test_every_reference_leads_somewhere() -> None:
    """No $ref names a schema that is not there, and no schema is left over."""
    names: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                names.add(node["$ref"].removeprefix("#/components/schemas/"))
            node = list(node.values())
        if isinstance(node, list):
            for inner in node:
                walk(inner)

    walk(DOCUMENT)
    assert names == set(DOCUMENT["components"]["schemas"])


def test_operations_have_names_of_their_own() -> None:
    """Clients are generated from operation ids: each is there, once."""
    ids = [operation["operationId"] for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))
    assert all(name.isidentifier() for name in ids)


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """True if ``value`` is what ``schema`` says, for the parts of JSON Schema that the description uses."""
    if "$ref" in schema:
        return conforms(value, DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return any(conforms(value, one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity") and schema.get("type") == "number":
        return True
    types = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    if not isinstance(value, types[schema["type"]]):
        return False
    if isinstance(value, list):
        return all(conforms(one, schema.get("items", {"type": "null"})) for one in value)
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        named = all(name in value for name in schema.get("required", ()))
        inner = [conforms(one, known.get(name, others)) for name, one in value.items() if name in known or others]
        return named and all(inner) and (bool(others) or set(value) <= set(known))
    return True


@pytest.fixture
def relays(request: pytest.FixtureRequest) -> Callable[..., RelayClient]:
    """Makes relay clients that are closed at the end."""

    def make(*args: Any, **kwargs: Any) -> RelayClient:
        client = RelayClient(*args, **kwargs)
        request.addfinalizer(client.close)
        return client

    return make


def test_answers_are_what_is_described(tmp_path: Path, relays: Callable[..., RelayClient]) -> None:
    """Each JSON answer of a coordinator with an incident conforms to its schema, and so do its refusals."""
    with Coordinator(CoordinatorSettings(run_dir=tmp_path / "c")) as coordinator:
        relay = relays(coordinator.join)
        relay.send([hello(0), hello(1)])
        relay.await_ack(relay.send(fault_of(1)))
        [incident] = coordinator.incidents()
        asked = 0
        bearer = {"Authorization": f"Bearer {acting_token(coordinator.join.command_key)}"}
        for path in PATHS:
            if path.model is None:
                continue
            url = f"{coordinator.http_url}{path.path.replace('{id}', incident.id)}"
            responses = DOCUMENT["paths"][path.path][path.method]["responses"]
            absent = 409 if 409 in path.refusals else 404
            for query, status in (("?run_id=run", path.status), ("", 400), ("?run_id=absent", absent)):
                if str(status) not in responses or (status == 400 and not path.refusals.get(400)):
                    continue
                body = {"by": "me", "note": "seen"} if path.body else None
                answer = httpx.request(path.method, url + query, json=body, headers=bearer)
                assert answer.status_code == status, url + query
                schema = responses[str(status)]["content"]["application/json"]["schema"]
                assert conforms(answer.json(), schema), (path.path, answer.text)
                asked += 1
        assert asked >= 12
