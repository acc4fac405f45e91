"""What runs beside a job: how it starts, what is done without, and how it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel.launch import injection, launcher, watch
from sentinel.launch.embedded import CoordinatorRefused
from sentinel.launch.options import LaunchOptions, parse
from sentinel.launch.relay import Drained
from sentinel.launch.rendezvous import NoRendezvous
from sentinel.launch.watch import Watch, begin, finish


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchOptions]:
    """Options of a launch on one node; the environment is put back afterwards."""
    before = dict(os.environ)
    yield parse(
        ["--sentinel-run-dir", str(tmp_path / "run"), "--sentinel-http-bind", "off", "--nproc-per-node", "2", "x.py"],
        {},
    )
    os.environ.clear()
    os.environ.update(before)


def record(options: LaunchOptions) -> dict[str, object]:
    """``run.json`` of the launch."""
    assert options.run_dir
    return json.loads((options.run_dir / "run.json").read_text())  # type: ignore[no-any-return]


def test_a_watch_begins_and_ends(options: LaunchOptions, capsys: pytest.CaptureFixture[str]) -> None:
    """Coordinator, relay and environment are there between begin and finish; the record says how it went."""
    watched = begin(options)
    assert watched is not None
    assert os.environ["SENTINEL_RELAY"] == watched.relay.address
    assert record(options)["coordinator"] == "embedded"
    assert record(options)["finished_at"] is None
    finish(watched, 1)
    assert record(options)["exit_code"] == 1
    assert record(options)["unsent_critical"] == 0
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(
    "error",
    [
        OSError(98, "Address already in use"),
        RuntimeError("another coordinator works here"),
        CoordinatorRefused("the coordinator refuses its settings: a token"),
        NoRendezvous("cannot tell which interface"),
    ],
)
def test_without_a_coordinator_the_relay_still_keeps_reports(
    error: Exception, options: LaunchOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A coordinator that cannot start is one warning and a note in run.json; the ranks still find a relay."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(watch, "start_coordinator", fail)
    watched = begin(options)
    assert watched is not None
    assert os.environ["SENTINEL_RELAY"] == watched.relay.address
    assert len(os.environ["SENTINEL_COMMAND_KEY"]) == 64, "commands stay signed, though nobody sends any"
    finish(watched, 0)
    said = capsys.readouterr().err
    assert said.count("sentinel: warning:") == 1
    assert "Traceback" not in said
    (reason,) = record(options)["degraded"]  # type: ignore[misc]
    assert str(error).splitlines()[0] in reason
    assert record(options)["unsent_critical"] == 1, "the end of the node is kept for whoever reads the spool"


def test_without_an_agent_there_is_nothing_to_watch(
    options: LaunchOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installation without the agent runs the job as plain torchrun, after one line that says why."""
    monkeypatch.setattr(injection, "AGENT_PACKAGE", "no_such_agent_package")
    assert begin(options) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "sentinel: warning: no package no_such_agent_package; training goes on as plain torchrun, unwatched"
    )
    assert "SENTINEL_AGENT" not in os.environ


def test_a_relay_that_cannot_start_takes_the_coordinator_with_it(
    options: LaunchOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a Sentinel is none: the coordinator is stopped, its directory free again, and the job runs."""

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(watch, "Relay", fail)
        assert begin(options) is None
    assert "Too many open files" in capsys.readouterr().err
    again = begin(options)
    assert again is not None
    assert record(options)["coordinator"] == "embedded"
    finish(again, 0)


def test_an_end_that_cannot_be_recorded_is_said_and_survived(
    options: LaunchOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that fills up at the very end costs the summary, never the job's exit code."""
    watched = begin(options)
    assert watched is not None
    monkeypatch.setattr(
        type(watched.record), "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    finish(watched, 0)
    assert "the end of the run could not be recorded: [Errno 28] No space left on device" in capsys.readouterr().err


def test_a_relay_that_died_is_said(options: LaunchOptions, capsys: pytest.CaptureFixture[str]) -> None:
    """If the relay's own thread failed, the user reads that reports were lost, and why."""
    watched = begin(options)
    assert watched is not None
    watched.relay._take = lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
    with _rank(watched.relay.address):
        watched.relay._thread.join(5.0)
    finish(watched, 0)
    assert "the relay stopped early (ZeroDivisionError: division by zero)" in capsys.readouterr().err
    assert isinstance(watched.relay.drained(), Drained)


class _rank:
    """A rank that sends one frame."""

    def __init__(self, address: str) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)

    def __enter__(self) -> None:
        self._socket.send(b"x")

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()


@pytest.mark.parametrize("broken", ["begin", "finish"])
def test_a_mistake_of_ours_changes_neither_start_nor_end(
    options: LaunchOptions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Whatever fails before or after the job: the job runs, its exit code stands, and one line says what failed."""

    def mistaken(options: LaunchOptions) -> Watch | None:
        raise KeyError("planted")

    def mistaken_end(watched: Watch, exit_code: int) -> None:
        finish(watched, exit_code)
        raise KeyError("planted")

    monkeypatch.setattr(launcher, broken, {"begin": mistaken, "finish": mistaken_end}[broken])
    monkeypatch.setattr(launcher, "_train", lambda _torchrun: 7)
    monkeypatch.setattr(launcher, "hold", lambda *_: None)
    assert launcher.launch(options) == 7
    said = capsys.readouterr().err
    assert "a fault of Sentinel's own: KeyError: 'planted'" in said
