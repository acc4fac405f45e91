"""``sentinel top``: one frame from a real coordinator, what it shows of it, and how it fails."""

from __future__ import annotations

import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from relay_client import RelayClient, wait_until
from training_story import TrainingStory, send
from typer.testing import CliRunner

from sentinel.cli.app import app
from sentinel.cli.top_frame import sparkline
from sentinel.coordinator.app import Coordinator
from sentinel.coordinator.config import CoordinatorSettings


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    """A coordinator that has heard twelve rounds of four ranks, the eighth of them with a NaN of rank 2."""
    with Coordinator(CoordinatorSettings(run_dir=tmp_path / "run", run_id="digits")) as started:
        story = TrainingStory(4, {7: 2})
        relay = RelayClient(started.join, "digits", world_size=4)
        send(relay, story.hellos())
        for number in range(12):
            send(relay, story.round(number))
        wait_until(started.incidents, "the incident is on disk")
        wait_until(lambda: (started.status(False) or ())[0].rounds_checked == 12, "twelve rounds judged")
        yield started
        relay.close()


def frame_of(*words: str) -> str:
    """What one frame shows."""
    ran = CliRunner().invoke(app, ["top", "--once", *words], env={"COLUMNS": "140"})
    assert ran.exit_code == 0, ran.stderr
    return ran.stdout


def test_a_frame_shows_run_curves_ranks_and_incident(coordinator: Coordinator) -> None:
    """Who, how far, the curves, each rank's rounds and the incident with its step and rank are on one screen."""
    shown = frame_of("--http", str(coordinator.http_url))
    assert re.search(r"digits +going on +4 ranks \(4 running\) +12 rounds +1 incident open", shown)
    for name in ("loss", "scale", "norm", "s/round"):
        assert re.search(rf"^ +{re.escape(name)} +\S", shown, re.MULTILINE), name
    rows = dict(re.findall(r"^ +rank (\d) +(\S+)$", shown, re.MULTILINE))
    assert {rank: row.index("█") if "█" in row else None for rank, row in rows.items()} == {
        "0": None,
        "1": None,
        "2": 7,
        "3": None,
    }
    assert re.search(r"critical +nonfinite_gradient \(open\) +step 7, rank 2 +a0-r000007-01", shown)


def test_the_run_directory_names_the_coordinator(coordinator: Coordinator) -> None:
    """With a run directory, its own files say where the pages are."""
    assert "digits" in frame_of("--run-dir", str(coordinator.run_dir))


def test_a_coordinator_that_is_gone_is_one_line(tmp_path: Path) -> None:
    """Exit code 4, whether nobody answers or nothing says where to ask."""
    for words in (["--http", "http://127.0.0.1:9"], ["--run-dir", str(tmp_path)]):
        ran = CliRunner().invoke(app, ["top", *words])
        assert ran.exit_code == 4
        assert ran.stderr.startswith("sentinel: error: ")
        assert len(ran.stderr.splitlines()) == 2


def test_a_terminal_is_redrawn_and_left_with_ctrl_c(coordinator: Coordinator) -> None:
    """On a terminal frames follow each other on the alternate screen; Ctrl-C ends it with exit code 0."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "sentinel.cli.main", "top", "--http", str(coordinator.http_url), "-n", "0.2"]
    watching = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(slave)
    try:
        seen = read_until(master, lambda seen: seen.count(b"Sentinel") >= 3)
        watching.send_signal(signal.SIGINT)
        seen += read_until(master, lambda _: watching.poll() is not None)
        assert watching.wait(10) == 0
    finally:
        watching.kill()
        watching.wait(10)
        os.close(master)
    assert seen.count(b"Sentinel") >= 3
    assert b"\x1b[?1049h" in seen


def read_until(terminal: int, enough: Callable[[bytes], bool]) -> bytes:
    """What was written to a terminal until ``enough``, until its other end closed, or until a deadline."""
    seen, deadline = b"", time.monotonic() + 30
    while not enough(seen) and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 65536)
            except OSError:  # Linux says EIO once nobody holds the other end
                break
    return seen


def test_a_sparkline_marks_what_is_no_number() -> None:
    """Rising bars, a mark for NaN and infinity, nothing for nothing, and a flat line in the middle."""
    assert sparkline([1, 2, None, math.nan, math.inf, 3]).plain == "▁▅ !!█"
    assert sparkline([2, 2]).plain == "▅▅"
    assert sparkline([]).plain == ""
