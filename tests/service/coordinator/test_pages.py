"""The pages over real HTTP: what they answer, to whom, and with which headers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from relay_client import RelayClient, fault_of, hello

from sentinel.coordinator.app import Coordinator
from sentinel.coordinator.config import CoordinatorSettings
from sentinel.coordinator.http import HttpUnavailable
from sentinel.incidents.model import IncidentList

MakeRelay = Callable[..., RelayClient]
TOKEN = "a-token-of-some-length"
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def served(tmp_path: Path, relays: MakeRelay) -> Iterator[Coordinator]:
    """A standalone coordinator with pages, and one incident in a run with a hostile name."""
    with Coordinator(CoordinatorSettings(run_dir=tmp_path / "run")) as coordinator:
        relay = relays(coordinator.join, run_id=HOSTILE)
        relay.send([hello(0), hello(1)])
        relay.await_ack(relay.send(fault_of(1)))
        yield coordinator


def get(coordinator: Coordinator, path: str, **headers: str) -> httpx.Response:
    """One request."""
    assert coordinator.http_url is not None
    return httpx.get(coordinator.http_url + path, headers=headers, timeout=10)


def test_incidents_are_served_as_the_contract_says(served: Coordinator) -> None:
    """The list parses as the contract's model, filters by run, and one incident is found by its id."""
    listed = IncidentList.model_validate_json(get(served, "/api/v1/incidents").content)
    [incident] = listed.incidents
    assert incident.suspect_ranks == (1,)
    filtered = get(served, "/api/v1/incidents?run_id=nobody").json()
    assert filtered == {"schema_version": 1, "run_id": "nobody", "incidents": []}
    one = get(served, f"/api/v1/incidents/{incident.id}")
    assert one.json()["id"] == incident.id
    missing = get(served, "/api/v1/incidents/absent")
    assert (missing.status_code, missing.json()["error"]) == (404, "unknown_incident")


def test_runs_and_status_tell_ranks_and_rounds(served: Coordinator) -> None:
    """The status has every rank with its state and last round; ranks can be left out."""
    [run] = get(served, "/api/v1/runs").json()["runs"]
    assert (run["run_id"], run["incidents"], run["ended_at"]) == (HOSTILE, 1, None)
    [status] = get(served, "/api/v1/status").json()["runs"]
    assert (status["world_size"], status["last_round"], status["states"]) == (2, 0, {"running": 2})
    assert [(r["rank"], r["state"]) for r in status["ranks"]] == [(0, "running"), (1, "running")]
    [short] = get(served, "/api/v1/status?ranks=false").json()["runs"]
    assert short["ranks"] == []


def test_metrics_speak_both_formats(served: Coordinator) -> None:
    """A scraper that asks for OpenMetrics gets it, another gets the text format."""
    plain = get(served, "/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    openmetrics = get(served, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")
    for scraped in (plain, openmetrics):
        assert 'kind="nonfinite_gradient",severity="critical"} 1' in scraped.text


def test_health_turns_when_the_loop_is_stuck(served: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that has not come round for five seconds is 503 with its reason, and comes back by itself."""
    assert get(served, "/healthz").json()["status"] == "ok"
    with monkeypatch.context() as stuck:
        stuck.setattr(type(served._server), "beat", property(lambda self: 0.0, lambda self, value: None), raising=False)
        answer = get(served, "/healthz")
        assert (answer.status_code, answer.json()["status"]) == (503, "loop_stuck")
    assert get(served, "/healthz").status_code == 200


def test_health_turns_when_the_disk_refuses(served: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not accept commits is 503 with its reason."""
    monkeypatch.setattr(served._writer, "failing", True)
    answer = get(served, "/healthz")
    assert (answer.status_code, answer.json()["status"]) == (503, "store_failing")


def test_the_index_shows_hostile_names_as_text(served: Coordinator) -> None:
    """A run's name is never markup, and the policy would not run it if it were."""
    page = get(served, "/")
    assert HOSTILE not in page.text
    assert "&lt;script&gt;" in page.text
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "script-src" not in policy
    assert "unsafe-inline" not in policy


def test_every_answer_has_security_headers(served: Coordinator) -> None:
    """Pages, data, errors and refusals alike."""
    for path in ("/", "/metrics", "/healthz", "/api/v1/status", "/nowhere"):
        headers = get(served, path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers


def test_pages_can_only_be_read(served: Coordinator) -> None:
    """Any method but GET and HEAD is refused before it reaches a page."""
    assert served.http_url is not None
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert httpx.request(method, served.http_url + "/api/v1/incidents").status_code == 405
    assert httpx.head(served.http_url + "/healthz").status_code == 200


def test_a_foreign_host_name_is_refused_on_loopback(served: Coordinator) -> None:
    """A web page elsewhere whose name resolves to this machine reads nothing."""
    assert get(served, "/api/v1/incidents", host="evil.example").status_code == 421
    assert get(served, "/api/v1/incidents", host="localhost:1234").status_code == 200


def test_with_a_token_only_its_bearer_reads(tmp_path: Path) -> None:
    """Every page but health asks for the token; health does not, for the sake of probes."""
    settings = CoordinatorSettings(
        run_dir=tmp_path, http_bind="0.0.0.0:0", http_allow_remote=True, http_token=TOKEN, run_id="run"
    )
    with Coordinator(settings) as coordinator:
        assert coordinator.http_url is not None
        url = "http://127.0.0.1:" + coordinator.http_url.rpartition(":")[2]
        for path in ("/", "/metrics", "/api/v1/incidents", "/api/v1/status"):
            for authorization in (
                "",
                "Bearer",
                "Bearer wrong",
                f"Basic {TOKEN}",
                "Bearer é".encode().decode("latin-1"),
            ):
                refused = httpx.get(url + path, headers={"authorization": authorization.encode("latin-1")})
                assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert httpx.get(url + path, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert httpx.get(url + "/healthz").status_code == 200


def test_a_page_that_fails_is_counted_and_answers_500(served: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours is one named answer and one count, and the next request is served."""
    monkeypatch.setattr("sentinel.coordinator.pages._json", lambda *args: 1 / 0)
    answer = get(served, "/api/v1/runs")
    assert (answer.status_code, answer.json()["detail"]) == (500, "ZeroDivisionError")
    monkeypatch.undo()
    assert get(served, "/api/v1/runs").status_code == 200
    assert served.snapshot().faults["page"] == 1


def test_a_database_that_is_gone_is_503(served: Coordinator) -> None:
    """Pages say that the store is unreadable instead of failing."""
    (served.run_dir / "sentinel.db").rename(served.run_dir / "moved.db")
    answer = get(served, "/api/v1/incidents")
    assert (answer.status_code, answer.json()["error"]) == (503, "store_unreadable")


def test_a_port_that_is_taken_is_one_clear_error(served: Coordinator, tmp_path: Path) -> None:
    """Pages that cannot be served stop the start in one line and leave nothing running."""
    assert served.http_url is not None
    taken = served.http_url.removeprefix("http://")
    with pytest.raises(HttpUnavailable, match="cannot listen on 127"):
        Coordinator(CoordinatorSettings(run_dir=tmp_path / "second", http_bind=taken)).start()
    Coordinator(CoordinatorSettings(run_dir=tmp_path / "second")).start().stop()
