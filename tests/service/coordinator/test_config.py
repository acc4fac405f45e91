"""Settings: the environment they read, and what they refuse to do unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from sentinel.coordinator.config import CoordinatorSettings, is_loopback, join_host_port, split_host_port


def test_defaults_listen_on_loopback_only(tmp_path: Path) -> None:
    """Nothing is reachable from other hosts unless somebody says so."""
    settings = CoordinatorSettings(run_dir=tmp_path)
    assert settings.bind == "tcp://127.0.0.1:0"
    assert settings.http_bind == "127.0.0.1:0"
    assert settings.standalone


def test_the_environment_fills_in_what_is_not_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SENTINEL_COORDINATOR_… variables are defaults; keyword arguments win; the variables of ranks are not read."""
    monkeypatch.setenv("SENTINEL_COORDINATOR_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("SENTINEL_COORDINATOR_BIND", "tcp://127.0.0.1:7000")
    monkeypatch.setenv("SENTINEL_COORDINATOR_SYNCHRONOUS", "normal")
    monkeypatch.setenv("SENTINEL_RUN_ID", "of a rank")
    settings = CoordinatorSettings(bind="tcp://127.0.0.1:7001")  # type: ignore[call-arg]
    assert (settings.run_dir, settings.bind, settings.synchronous) == (tmp_path, "tcp://127.0.0.1:7001", "normal")
    assert settings.run_id is None


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "node-3"])
def test_pages_beyond_loopback_need_a_setting_and_a_token(tmp_path: Path, host: str) -> None:
    """Either one alone is refused, naming what is missing; pages that are off need neither."""
    bind = f"{host}:9000"
    with pytest.raises(ValidationError, match="http_allow_remote"):
        CoordinatorSettings(run_dir=tmp_path, http_bind=bind, http_token="t" * 16)
    with pytest.raises(ValidationError, match="set http_token"):
        CoordinatorSettings(run_dir=tmp_path, http_bind=bind, http_allow_remote=True)
    with pytest.raises(ValidationError, match="at least 16"):
        CoordinatorSettings(run_dir=tmp_path, http_bind=bind, http_allow_remote=True, http_token="short")
    allowed = CoordinatorSettings(run_dir=tmp_path, http_bind=bind, http_allow_remote=True, http_token="t" * 16)
    assert "tttt" not in repr(allowed)
    assert not CoordinatorSettings(run_dir=tmp_path, http_bind=bind, http_enabled=False).http_enabled


@pytest.mark.parametrize(
    "bind", ["ipc:///tmp/x", "tcp://host", "tcp://:1", "tcp://h:99999", "tcp://h:x", "127.0.0.1:0", "inproc://a"]
)
def test_only_tcp_endpoints_are_bound(tmp_path: Path, bind: str) -> None:
    """Other transports would be without CURVE or out of reach."""
    with pytest.raises(ValidationError):
        CoordinatorSettings(run_dir=tmp_path, bind=bind)


@pytest.mark.parametrize(
    ("field", "value"),
    [("client_keys", ("short",)), ("synchronous", "off"), ("max_runs", 0), ("run_id", ""), ("unknown", 1)],
)
def test_other_values_that_make_no_sense_are_refused(tmp_path: Path, field: str, value: object) -> None:
    """A typing mistake in a setting is an error at start, not a surprise later."""
    with pytest.raises(ValidationError, match=field):
        CoordinatorSettings(run_dir=tmp_path, **{field: value})  # type: ignore[arg-type]


def test_hosts_and_ports_go_apart_and_together() -> None:
    """IPv6 keeps its brackets in addresses and loses them as a host."""
    for address in ("127.0.0.1:80", "[::1]:443", "node-3:0"):
        assert join_host_port(*split_host_port(address)) == address
    assert [is_loopback(h) for h in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "0.0.0.0", "node")] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]
