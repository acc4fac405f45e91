"""The pages over real HTTP: what they answer, to whom, and with which headers."""

from __future__ import annotations

import html
import json
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from relay_client import RelayClient, fault_of, hello
from typer.testing import CliRunner

from sentinel.cli.app import app
from sentinel.coordinator.app import Coordinator
from sentinel.coordinator.config import CoordinatorSettings
from sentinel.coordinator.http import HttpUnavailable
from sentinel.incidents.model import IncidentList
from sentinel.wire.link import acting_token

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
    """A run's name is never markup on any page, and the policy would not run it if it were."""
    [incident] = served.incidents()
    name = quote(HOSTILE)
    for path in ("/", f"/run?id={name}", f"/incident?id={incident.id}&run_id={name}", f"/run?id=x{name}"):
        page = get(served, path)
        assert HOSTILE not in page.text
        assert "&lt;script&gt;" in page.text
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy


def test_the_next_commands_can_be_pasted(served: Coordinator) -> None:
    """What an incident's page says to run finds the incident, with a run name that a shell would split or run."""
    [incident] = served.incidents()
    page = get(served, f"/incident?id={incident.id}&run_id={quote(HOSTILE)}").text
    [commands] = re.findall(r"<pre><code>(.*?)</code></pre>", page, re.DOTALL)
    words = shlex.split(html.unescape(commands).splitlines()[0])
    assert words[:3] == ["sentinel", "incidents", "show"]
    ran = CliRunner().invoke(app, words[1:])
    assert ran.exit_code == 0, ran.stderr
    assert incident.id in ran.stdout


def test_pages_hold_no_inline_script_or_style(served: Coordinator) -> None:
    """What the policy forbids is not there: every script and style is a file of ours, and so is every picture."""
    [incident] = served.incidents()
    name = quote(HOSTILE)
    for path in ("/", f"/run?id={name}", f"/incident?id={incident.id}&run_id={name}", "/run?id=absent"):
        text = get(served, path).text
        assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|javascript:", text)
        for target in re.findall(r'(?:src|href)="(/static/[^"]*)"', text):
            answer = get(served, target)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(("text/javascript", "text/css", "image/svg+xml"))
        assert not re.search(r'(?:src|href)="(?:https?:)?//', text)


def test_files_that_are_not_ours_are_not_served(served: Coordinator) -> None:
    """No name leads out of the folder of pictures and scripts."""
    for name in ("..%2fpages.py", "%2e%2e/pages.py", "sentinel.css%00", "absent.js", "sentinel"):
        assert get(served, f"/static/{name}").status_code == 404


def test_a_run_or_incident_that_is_not_there_is_told(served: Coordinator) -> None:
    """The page says so, with 404 and a way back."""
    for path in ("/run?id=absent", "/run", "/incident?id=absent", "/incident"):
        page = get(served, path)
        assert page.status_code == 404
        assert 'href="/"' in page.text


def test_rounds_tell_curves_and_blocks(served: Coordinator) -> None:
    """The last rounds come with what every block of ranks saw; a run that is not there or a wrong number is refused by name."""
    name = quote(HOSTILE)
    answer = get(served, f"/api/v1/rounds?run_id={name}&blocks=1").json()
    assert (answer["world_size"], answer["ranks_per_block"]) == (2, 2)
    assert [r["blocks"] for r in answer["rounds"]] == ["4"]
    apart = get(served, f"/api/v1/rounds?run_id={name}&first=1&count=1").json()
    assert (apart["first_rank"], apart["rounds"][0]["blocks"]) == (1, "4")
    for query, status, reason in (
        ("run_id=absent", 404, "unknown_run"),
        ("", 400, "bad_query"),
        (f"run_id={name}&last=-1", 400, "bad_query"),
        (f"run_id={name}&blocks=9999999999", 400, "bad_query"),
    ):
        refused = get(served, f"/api/v1/rounds?{query}")
        assert (refused.status_code, refused.json()["error"]) == (status, reason)


def test_targets_name_the_coordinator_as_the_scraper_does(served: Coordinator) -> None:
    """Prometheus' http_sd gets one target: the very address it asked."""
    assert served.http_url is not None
    assert get(served, "/api/v1/targets").json() == [
        {"targets": [served.http_url.removeprefix("http://")], "labels": {}}
    ]


def test_changes_are_told_as_they_happen(served: Coordinator, relays: MakeRelay) -> None:
    """An open stream names every run at first, and then each run that something happened to."""
    with httpx.stream("GET", f"{served.http_url}/api/v1/events", timeout=10) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        assert json.loads(next(lines)[6:]) == {"runs": [HOSTILE]}
        relay = relays(served.join, run_id="other", relay="relay-1")
        relay.send([hello(0), hello(1)])
        assert json.loads(next(lines)[6:]) == {"runs": ["other"]}


def test_open_streams_do_not_hold_up_the_end(tmp_path: Path) -> None:
    """A coordinator with a page open on it stops as quickly as one without."""
    coordinator = Coordinator(CoordinatorSettings(run_dir=tmp_path / "c")).start()
    with httpx.stream("GET", f"{coordinator.http_url}/api/v1/events", timeout=10):
        started = time.monotonic()
        coordinator.stop(5.0)
        assert time.monotonic() - started < 4


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    """Address of a coordinator that asks for a token."""
    settings = CoordinatorSettings(
        run_dir=tmp_path, http_bind="0.0.0.0:0", http_allow_remote=True, http_token=TOKEN, run_id="run"
    )
    with Coordinator(settings) as coordinator:
        assert coordinator.http_url is not None
        yield "http://127.0.0.1:" + coordinator.http_url.rpartition(":")[2]


def test_a_browser_signs_in_with_the_token(guarded: str) -> None:
    """A browser is shown a form; the right token gives it a cookie that no script and no other site can use."""
    with httpx.Client(base_url=guarded, headers={"accept": "text/html"}) as browser:
        asked = browser.get("/")
        assert asked.status_code == 401
        assert 'action="/sign-in"' in asked.text
        assert browser.get("/static/sentinel.css").status_code == 200
        wrong = browser.post("/sign-in", data={"token": "wrong"})
        assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
        assert browser.get("/").status_code == 401
        right = browser.post("/sign-in", data={"token": TOKEN})
        assert (right.status_code, right.headers["location"]) == (303, "/")
        cookie = right.headers["set-cookie"]
        assert TOKEN not in cookie
        assert {"HttpOnly", "SameSite=Strict"} <= set(cookie.split("; "))
        for path in ("/", "/metrics", "/api/v1/status"):
            assert browser.get(path).status_code == 200


def test_sign_in_refuses_what_no_form_of_ours_sends(guarded: str) -> None:
    """A form on another site, a body that is too long, and one that is no form get no cookie."""
    for options, status in (
        ({"data": {"token": TOKEN}, "headers": {"sec-fetch-site": "cross-site"}}, 403),
        ({"content": b"token=" + b"x" * 100_000}, 413),
        ({"content": b"\xff\x00&&=&"}, 401),
        ({"content": b""}, 401),
    ):
        answer = httpx.post(f"{guarded}/sign-in", **options)  # type: ignore[arg-type]
        assert (answer.status_code, "set-cookie" in answer.headers) == (status, False)
    assert httpx.get(f"{guarded}/", cookies={"sentinel_session": "guessed"}).status_code == 401


def test_there_is_no_sign_in_where_there_is_no_token(served: Coordinator) -> None:
    """Without a token nothing can be posted at all."""
    assert httpx.post(f"{served.http_url}/sign-in", data={"token": ""}).status_code == 405


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


def test_the_report_of_a_run_is_linked_once_it_is_there(served: Coordinator, relays: MakeRelay) -> None:
    """A run whose directory holds a report links it, and serves it with a policy that lets no script run; a link is none."""
    relay = relays(served.join, run_id="run")
    relay.send([hello(0), hello(1)])
    relay.await_ack(relay.send(fault_of(1)))
    pages = ("/run?id=run", "/incident?id=a0-r000000-01&run_id=run")
    path = served._bundle_root("run", "") / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    assert all("/report?run_id=run" not in get(served, page).text for page in pages)
    assert get(served, "/report?run_id=run").status_code == 404
    path.symlink_to("/etc/passwd")
    assert get(served, "/report?run_id=run").status_code == 404
    path.unlink()
    path.write_text("<!doctype html><p>the story</p>")
    assert all("/report?run_id=run" in get(served, page).text for page in pages)
    answer = get(served, "/report?run_id=run")
    assert "the story" in answer.text
    assert "script-src" not in answer.headers["content-security-policy"]
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert get(served, "/report?run_id=absent").status_code == 404


def test_acting_needs_the_token_of_the_join_file(served: Coordinator) -> None:
    """On loopback everybody may read, but only who can read join.json may act; a wrong token and none are refused alike."""
    url = f"{served.http_url}/api/v1/dump?run_id=absent"
    right = acting_token(served.join.command_key)
    for given in (None, "", "Bearer", f"Bearer {right[:-1]}x", f"Basic {right}"):
        headers = {} if given is None else {"Authorization": given}
        assert httpx.post(url, headers=headers).status_code == 401
    assert httpx.post(url, headers={"Authorization": f"Bearer {right}"}).status_code == 409
    foreign = {"Authorization": f"Bearer {right}", "Host": "evil.example"}
    assert httpx.post(url, headers=foreign).status_code == 421
    assert httpx.get(url, headers={"Authorization": f"Bearer {right}"}).status_code == 405


def test_a_browser_s_session_may_read_and_not_act(guarded: str) -> None:
    """The cookie of the sign-in form is sent by a browser whoever made it ask: it never suffices to act, the token does."""
    url = f"{guarded}/api/v1/dump?run_id=absent"
    with httpx.Client() as browser:
        browser.post(f"{guarded}/sign-in", data={"token": TOKEN})
        assert browser.get(f"{guarded}/").status_code == 200
        assert browser.post(url).status_code == 401
    assert httpx.post(url, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 409


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'{"by": ""}', b'{"by": "me", "more": 1}', b'{"by": "' + b"x" * 20_000 + b'"}']
)
def test_an_acknowledgement_that_is_none_is_refused(served: Coordinator, body: bytes) -> None:
    """What is not an acknowledgement changes nothing, and is told in a line."""
    headers = {"Authorization": f"Bearer {acting_token(served.join.command_key)}"}
    answer = httpx.post(f"{served.http_url}/api/v1/incidents/x/ack?run_id=run", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]) == (400, "bad_query")


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
