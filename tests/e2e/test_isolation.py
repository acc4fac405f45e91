"""Whatever happens to Sentinel, the training neither waits nor changes; and what is seen is known within a second."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from launch_job import wait_for
from training_run import SENTINEL, Ahead, Case, Ran, environment, finish, start

from sentinel.wire.messages import Disabled

pytestmark = pytest.mark.e2e

PLAIN = Case("paced.py", watched=False)
FAULT_WITHIN = Case("paced.py", options=(("fail_at", "wire"),))
CLIPPED = Case("clipping.py", options=(("check_delay", 0.02),))
NAN = Case("paced.py", ("nan",))
STEP_SECONDS = 1.0  # of a step that takes milliseconds, on a machine where others run: far below any timeout of ours
INCIDENT_SECONDS = 1.0


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A coordinator in a process of its own, whose join file is in place."""
    words = [sys.executable, *SENTINEL, "coordinator", "--run-dir", str(tmp_path / "c"), "--no-http"]
    running = subprocess.Popen(words, cwd=tmp_path, env=environment(PLAIN), stderr=subprocess.DEVNULL, text=True)
    wait_for((tmp_path / "c" / "join.json").exists, "the coordinator")
    yield running
    running.kill()
    running.wait(timeout=20)


def meddled(place: Path, coordinator: subprocess.Popen[str], sent: signal.Signals, *arguments: str) -> Ran:
    """A training that joined ``coordinator``, which gets a signal while all ranks stand still at step 10."""
    case = Case("paced.py", ("halt", *arguments), flags=("--sentinel-join", str(place / "c" / "join.json")))
    since = time.monotonic()
    process = start(case, place)
    wait_for(lambda: len(list(place.glob("at-*"))) == 2 or process.poll() is not None, "both ranks at step 10")
    coordinator.send_signal(sent)
    (place / "go").touch()
    return finish(process, place, since)


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("plain", [pytest.param(PLAIN, id="")])
def test_a_coordinator_that_dies_or_freezes_changes_nothing_of_the_training(
    ahead: Ahead, plain: Case, tmp_path: Path, coordinator: subprocess.Popen[str], fate: signal.Signals
) -> None:
    """Killed or frozen in the middle: same losses and parameters, exit code 0, no long step, and the lost reports are counted."""
    ran = meddled(tmp_path, coordinator, fate)
    assert ran.exit_code == 0, ran.said
    assert ran.printed("digest") == ahead.of(plain).printed("digest")
    assert max(float(seconds) for seconds in ran.printed("longest").values()) < STEP_SECONDS
    assert "sentinel: " in ran.stderr
    assert sum(ran.record["drops"].values()) + ran.record["unsent_critical"] > 0, ran.said
    assert "reports dropped: " in ran.stderr or "reached no coordinator; kept in" in ran.stderr


def test_evidence_outlives_the_coordinator(tmp_path: Path, coordinator: subprocess.Popen[str]) -> None:
    """NaN met after the coordinator died is on disk, and the last words say where."""
    ran = meddled(tmp_path, coordinator, signal.SIGKILL, "nan")
    assert ran.exit_code == 0, ran.said
    assert ran.record["unsent_critical"] > 0
    assert "may hold an incident reached no coordinator; kept in run/spool" in ran.stderr
    assert list((ran.run_dir / "spool").iterdir())


@pytest.mark.parametrize("case", [pytest.param(FAULT_WITHIN, id="wire")])
@pytest.mark.parametrize("plain", [pytest.param(PLAIN, id="")])
def test_an_agent_that_faults_switches_itself_off(ahead: Ahead, plain: Case, ran: Ran) -> None:
    """A tap that raises each time: one clear line per rank, the agent is off, and the training is the same as without it."""
    assert ran.exit_code == 0, ran.said
    assert ran.printed("digest") == ahead.of(plain).printed("digest")
    for rank in (0, 1):
        said = f"sentinel: agent of rank {rank} switched itself off, training goes on unwatched: "
        assert ran.stderr.count(said) == 1, ran.said
    assert "Traceback" not in ran.stderr
    assert sorted(r.rank for r in ran.reports if isinstance(r, Disabled)) == [0, 1]
    assert ran.brief == []


@pytest.mark.parametrize("case", [pytest.param(FAULT_WITHIN, id="wire")])
def test_what_an_agent_swallowed_is_counted(ran: Ran) -> None:
    """The faults of an agent that switched itself off reach the coordinator, by name."""
    assert ran.faults == {"wire:RuntimeError": 10}, ran.said


@pytest.mark.parametrize("case", [pytest.param(FAULT_WITHIN, id="wire")])
def test_the_last_words_tell_of_unwatched_ranks(ran: Ran) -> None:
    """A run whose agents were off is not called one without incidents without saying so."""
    last = ran.stderr.rsplit("sentinel: no incidents", 1)[1]
    assert "unwatched" in last or "switched" in last, ran.said


@pytest.mark.parametrize("case", [pytest.param(CLIPPED, id="240-rounds")])
def test_no_check_reads_a_clipped_gradient(ran: Ran) -> None:
    """240 rounds, clipped right after backward while each check is held up by 20 ms: every round checked, no verdict at all."""
    assert ran.exit_code == 0, ran.said
    assert ran.counts["rounds_checked"] == 240
    assert ran.brief == [], ran.said
    assert not ran.faults
    assert not ran.drops


@pytest.mark.parametrize("case", [pytest.param(NAN, id="nan")])
def test_an_incident_opens_within_a_second(ran: Ran) -> None:
    """From the end of the backward that made it to the incident: under a second."""
    (incident,) = ran.incidents
    opened = datetime.fromisoformat(incident["opened_at"]).timestamp()
    assert incident["step"] == 30
    assert 0.0 <= opened - float(ran.printed("at")[1]) < INCIDENT_SECONDS


@pytest.mark.parametrize("case", [pytest.param(NAN, id="nan")])
def test_nothing_is_left_running(ran: Ran) -> None:
    """After the run no process of it is left."""
    assert ran.exit_code == 0, ran.said
    mark = f"SENTINEL_RUN_DIR={ran.run_dir}".encode()
    assert not [place for place in Path("/proc").glob("[0-9]*/environ") if mark in _read(place)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
