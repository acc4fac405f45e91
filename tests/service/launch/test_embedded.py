"""Settings of the coordinator inside a launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.launch import embedded
from sentinel.launch.embedded import CoordinatorRefused, judged, settings
from sentinel.launch.options import parse


@pytest.mark.parametrize(
    ("words", "host", "bind", "advertised"),
    [
        ([], None, "tcp://127.0.0.1:0", "127.0.0.1"),
        ([], "127.0.0.1", "tcp://127.0.0.1:0", "127.0.0.1"),
        (["--sentinel-bind", "10.1.2.3"], None, "tcp://10.1.2.3:0", "10.1.2.3"),
        (["--sentinel-bind", "10.1.2.3:99"], "head", "tcp://10.1.2.3:99", "10.1.2.3"),
        (["--sentinel-bind", "tcp://10.1.2.3:99"], None, "tcp://10.1.2.3:99", "10.1.2.3"),
        (["--sentinel-bind", "fd00::7"], None, "tcp://[fd00::7]:0", "fd00::7"),
        (["--sentinel-bind", "[fd00::7]:99"], None, "tcp://[fd00::7]:99", "fd00::7"),
    ],
)
def test_it_listens_where_it_must_and_nowhere_else(
    words: list[str], host: str | None, bind: str, advertised: str, tmp_path: Path
) -> None:
    """Loopback for one node, the rendezvous' interface for several, the user's word where given."""
    chosen = settings(parse([*words, "x.py"], {}), tmp_path, "run-1", host)
    assert (chosen.bind, chosen.advertise_host, chosen.run_id) == (bind, advertised, "run-1")


def test_several_nodes_bind_the_interface_of_the_rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface that the rendezvous endpoint names is the one that is bound."""
    monkeypatch.setattr(embedded, "local_address_towards", {"head": "10.0.0.7"}.__getitem__)
    assert settings(parse(["x.py"], {}), tmp_path, "run-1", "head").bind == "tcp://10.0.0.7:0"


def test_pages_can_be_moved_and_switched_off(tmp_path: Path) -> None:
    """--sentinel-http-bind moves the pages, 'off' leaves them out."""
    moved = settings(parse(["--sentinel-http-bind", "127.0.0.1:9401", "x.py"], {}), tmp_path, "run-1", None)
    assert (moved.http_enabled, moved.http_bind) == (True, "127.0.0.1:9401")
    assert not settings(parse(["--sentinel-http-bind", "off", "x.py"], {}), tmp_path, "run-1", None).http_enabled


def test_pages_for_others_need_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond loopback the pages ask for a token: without one the coordinator refuses in one line."""
    options = parse(["--sentinel-http-bind", "0.0.0.0:9401", "x.py"], {})
    with pytest.raises(CoordinatorRefused, match="token") as refused:
        settings(options, tmp_path, "run-1", None)
    assert "\n" not in str(refused.value)
    monkeypatch.setenv("SENTINEL_COORDINATOR_HTTP_TOKEN", "t" * 32)
    assert settings(options, tmp_path, "run-1", None).http_allow_remote


def test_a_coordinator_that_saw_nothing_has_judged_nothing(tmp_path: Path) -> None:
    """The verdicts are read from the database of a coordinator that has stopped."""
    embedded.start_coordinator(parse(["--sentinel-http-bind", "off", "x.py"], {}), tmp_path, "run-1", None).stop()
    found = judged(tmp_path, "run-1")
    assert (list(found.incidents), found.rounds_checked, found.benign_skips) == ([], 0, 0)
