"""Commands against a coordinator that runs: ``--http``, tokens, and ``sentinel coordinator`` as its own process."""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import story

from sentinel.coordinator.app import Coordinator
from sentinel.coordinator.config import CoordinatorSettings
from sentinel.wire.link import Join

Command = Callable[..., Any]
DEADLINE_SECONDS = 20.0


@pytest.fixture
def served(run_dir: Path) -> Iterator[str]:
    """Pages of a coordinator that took up the story's run."""
    with Coordinator(CoordinatorSettings(run_dir=run_dir)) as running:
        assert running.http_url
        yield running.http_url


def test_pages_give_what_the_directory_gives(sentinel: Command, served: str, run_dir: Path) -> None:
    """``--http`` lists the same incidents as ``--run-dir``, with the same exit code."""
    live = sentinel("incidents", "ls", "--http", served, "--run-id", story.RUN, "-o", "json")
    kept = sentinel("incidents", "ls", "--run-dir", run_dir, "-o", "json")
    assert live.code == kept.code == 3
    assert json.loads(live.out) == json.loads(kept.out)


def test_address_comes_from_the_environment(
    sentinel: Command, served: str, monkeypatch: pytest.MonkeyPatch, healthy_dir: Path
) -> None:
    """SENTINEL_HTTP is the default of --http; --run-dir on the command line wins over it."""
    monkeypatch.setenv("SENTINEL_HTTP", served)
    assert sentinel("incidents", "ls").code == 3
    assert sentinel("incidents", "ls", "--run-dir", healthy_dir).code == 0


def test_show_over_http_names_the_bundle(sentinel: Command, served: str) -> None:
    """The page of an incident works without its files: bundle and commands are relative to the run directory."""
    ran = sentinel("incidents", "show", "a0", "--http", served)
    assert ran.code == 0
    assert f"sentinel dump show bundles/{story.BUNDLE}" in ran.out


def test_status_of_a_directory_and_of_a_coordinator(sentinel: Command, served: str, healthy_dir: Path) -> None:
    """``status`` tells a run's state from its database, and asks a running coordinator through its pages."""
    kept = sentinel("status", "--run-dir", healthy_dir)
    assert kept.code == 0
    assert "ended 20" in kept.out
    assert "rounds_checked 12" in kept.out
    assert json.loads(sentinel("status", "--run-dir", healthy_dir, "-o", "json").out)["runs"][0]["run_id"] == story.RUN
    live = sentinel("status", "--http", served, "-o", "json")
    assert live.code == 0
    assert "runs" in json.loads(live.out)


def test_coordinator_that_wants_a_token_refuses_without(sentinel: Command, run_dir: Path) -> None:
    """Without its token the exit code is 5 and the hint says how to give it; with it the answer comes."""
    token = "t" * 24
    with Coordinator(CoordinatorSettings(run_dir=run_dir, http_token=token)) as running:
        refused = sentinel("incidents", "ls", "--http", running.http_url)
        answered = sentinel("incidents", "ls", "--http", running.http_url, "--token", token)
    assert (refused.code, refused.out) == (5, "")
    assert "--token" in refused.err
    assert answered.code == 3


def test_what_is_no_coordinator_is_told_apart(sentinel: Command, tmp_path: Path) -> None:
    """A server that answers something else is not taken for an empty list of incidents."""
    (tmp_path / "api" / "v1").mkdir(parents=True)
    (tmp_path / "api" / "v1" / "incidents").write_text("<html>")
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as other:
        assert other.stdout
        port = other.stdout.readline().split(" port ")[1].split()[0]
        ran = sentinel("incidents", "ls", "--http", f"http://127.0.0.1:{port}")
        other.kill()
    assert (ran.code, ran.out) == (1, "")
    assert "does not answer as a coordinator" in ran.err


class Standalone:
    """``sentinel coordinator`` as its own process."""

    def __init__(self, *words: str | Path) -> None:
        command = [sys.executable, "-m", "sentinel.cli.main", "coordinator", *map(str, words)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE)
        self.said = ""

    def read_until(self, word: str) -> str:
        """Its stderr until it has said ``word``."""
        assert self.process.stderr
        deadline = time.monotonic() + DEADLINE_SECONDS
        while word not in self.said and time.monotonic() < deadline:
            if select.select([self.process.stderr], [], [], 0.2)[0]:
                said = os.read(self.process.stderr.fileno(), 65536)
                self.said += said.decode()
                if not said:
                    break
        return self.said

    def end(self, number: signal.Signals) -> int:
        """Exit code after the signal."""
        self.process.send_signal(number)
        try:
            return self.process.wait(DEADLINE_SECONDS)
        finally:
            self.process.kill()
            assert self.process.stderr
            self.said += self.process.stderr.read().decode()
            self.process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_standalone_coordinator_says_where_it_is(sentinel: Command, tmp_path: Path, number: signal.Signals) -> None:
    """It prints address and join file, answers, and ends in order with exit code 0 on SIGTERM and SIGINT."""
    running = Standalone("--run-dir", tmp_path / "c")
    said = running.read_until("launchers join with")
    try:
        join_file = tmp_path / "c" / "join.json"
        assert str(join_file) in said
        assert stat.S_IMODE(join_file.stat().st_mode) == 0o600
        join = Join.read(join_file)
        assert join.endpoint in said
        assert join.http
        assert sentinel("incidents", "ls", "--http", join.http).code == 0
    finally:
        code = running.end(number)
    assert code == 0
    assert running.said.endswith("coordinator stopped\n")


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("--bind", "udp://x"), 2, "bind must be tcp://host:port"),
        (("--http-bind", "0.0.0.0:0"), 2, "reachable from other hosts"),
        (("--token-file", "absent"), 2, "cannot read the token file"),
        (("--bind", "tcp://192.0.2.1:7000"), 1, "the coordinator cannot start"),
    ],
)
def test_coordinator_that_cannot_start_says_why(
    sentinel: Command, tmp_path: Path, words: tuple[str, str], code: int, error: str
) -> None:
    """Settings it does not accept are a usage error, an address it cannot bind a failure; one line and a hint each."""
    ran = sentinel("coordinator", "--run-dir", tmp_path / "c", *words)
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (code, "", 2), ran.err
    assert error in ran.err


def test_second_coordinator_in_one_directory_is_refused(sentinel: Command, served: str, run_dir: Path) -> None:
    """A run directory has one coordinator; the second one says who is there already."""
    ran = sentinel("coordinator", "--run-dir", run_dir)
    assert ran.code == 1
    assert "another coordinator works in" in ran.err
