"""``sentinel run`` on one node as a user meets it: real torchrun, real processes, a real coordinator.

The workers are small scripts without torch. Where reports matter, a worker speaks to the relay itself, as the agent would.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_job import (
    NOTE_ENVIRONMENT,
    SECONDS,
    SENTINEL,
    SPEAK_TO_THE_RELAY,
    TORCHRUN,
    Job,
    spooled_reports,
    wait_for,
)

from sentinel.coordinator.store import IncidentReader
from sentinel.incidents.model import Attribution, Kind
from sentinel.wire.messages import Evidence, NodeEnded

pytestmark = pytest.mark.e2e


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job whose launchers are gone after the test."""
    job = Job(tmp_path)
    yield job
    job.end()


@pytest.mark.parametrize("form", ["script", "module", "no-python"])
def test_every_form_of_training_program_gets_the_agent(job: Job, form: str) -> None:
    """A script, a module and a program of any kind run with their own arguments, the agent first on the path."""
    script = job.script(NOTE_ENVIRONMENT)
    program = {
        "script": (script, "--lr", "0.1"),
        "module": ("-m", "train", "--lr", "0.1"),
        "no-python": ("--no-python", sys.executable, script, "--lr", "0.1"),
    }[form]
    code, stderr = job.run(*job.here("--nproc-per-node", "2"), *program, PYTHONPATH="/mine")
    assert code == 0, stderr
    assert list(job.seen()) == ["0-0", "0-1"]
    for seen in job.seen().values():
        environ = seen["environ"]
        site, *rest = environ["PYTHONPATH"].split(os.pathsep)
        assert (Path(site) / "sitecustomize.py").is_file()
        assert rest == ["/mine"]
        assert site in seen["path"]
        assert seen["argv"][1:] == ["--lr", "0.1"]
        assert environ["SENTINEL_RUN_DIR"] == str(job.run_dir)
        assert environ["SENTINEL_RELAY"].startswith("ipc://")
    assert job.run_dir.stat().st_mode & 0o777 == 0o700
    assert (job.record()["exit_code"], job.record()["world_size"]) == (0, 2)


def test_a_healthy_run_is_two_short_lines(job: Job) -> None:
    """A healthy run costs a line at the start and a line at the end, neither over 100 columns."""
    code, stderr = job.run(
        "--sentinel-run-dir", "D", "--nproc-per-node", "2", job.script(SPEAK_TO_THE_RELAY.replace("rank == 1", "False"))
    )
    ours = [line for line in stderr.splitlines() if line.startswith("sentinel:")]
    assert code == 0, stderr
    assert len(ours) == 2
    assert all(len(line) <= 100 for line in ours)
    assert ours[1] == "sentinel: no incidents in 5 rounds · D"
    assert job.run("--sentinel-quiet", "--nproc-per-node", "1", job.script("pass")) == (0, "")


def test_a_failing_script_ends_as_with_torchrun(job: Job) -> None:
    """Exit code and failure report are torchrun's own; Sentinel's last word comes after them."""
    # The other rank lives until torchrun ends it: whether one that ends by itself is still there then is a race.
    script = job.script("import os, sys, time; time.sleep(60 if os.environ['RANK'] == '0' else 0); sys.exit(3)")
    words = ("--nproc-per-node", "2", script)
    plain_code, plain = job.run(*words, launcher=TORCHRUN)
    code, stderr = job.run(*job.here(*words))
    assert code == plain_code == 1
    assert _report(stderr) == _report(plain)
    assert stderr.rstrip().splitlines()[-1].startswith("sentinel:")
    assert job.record()["exit_code"] == 1


def _report(stderr: str) -> list[str]:
    """torchrun's failure report from its first own frame on, without times, pids, and line numbers of the launcher."""
    lines = stderr[stderr.index("    return f(*args, **kwargs)") :].splitlines()
    kept = [
        line
        for line in lines
        if "sentinel:" not in line and "run.py" not in line and line.strip() not in ("run(args)", "^^^^^^^^^")
    ]
    return [re.sub(r"\d\d:\d\d:\d\d|(?i:pid:?) \d+|line \d+", "#", line) for line in kept]


def test_restarts_are_torchruns(job: Job) -> None:
    """--max-restarts restarts the workers, which know their attempt, and success after it is success."""
    script = job.script(NOTE_ENVIRONMENT + "\n    sys.exit(attempt == '0')\n")
    code, stderr = job.run(*job.here("--max-restarts", "1", "--nproc-per-node", "2", script))
    assert code == 0, stderr
    assert list(job.seen()) == ["0-0", "0-1", "1-0", "1-1"]
    relays = {seen["environ"]["SENTINEL_RELAY"] for seen in job.seen().values()}
    assert len(relays) == 1, "the relay outlives an attempt"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_workers_and_the_run_is_closed(job: Job, sent: signal.Signals) -> None:
    """A signal to the launcher ends the job as with torchrun: workers see it, the exit code is the same, the record is whole."""
    script = job.script(
        NOTE_ENVIRONMENT
        + """
    import signal, time
    def leave(number, frame):
        Path(os.environ["NOTES"], f"signal-{rank}").write_text(str(number))
        sys.exit(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    Path(os.environ["NOTES"], f"ready-{rank}").touch()
    time.sleep(60)
    """
    )
    codes = {}
    for launcher, words in ((TORCHRUN, ()), (SENTINEL, job.here())):
        for old in job.notes.iterdir():
            old.unlink()
        process = job.start(*words, "--nproc-per-node", "2", script, launcher=launcher)
        wait_for(lambda: len(list(job.notes.glob("ready-*"))) == 2, "both workers")
        process.send_signal(sent)
        _, stderr = process.communicate(timeout=SECONDS)
        codes[launcher] = process.returncode
        assert len(list(job.notes.glob("signal-*"))) == 2
        assert "SignalException" in stderr
    assert codes[SENTINEL] == codes[TORCHRUN]
    assert "sentinel: no incidents" in stderr
    assert job.record()["exit_code"] == 1
    assert job.record()["finished_at"] is not None


def test_an_incident_is_told_at_the_end(job: Job) -> None:
    """Reports travel from the ranks to the verdict, and the end of the run names step, rank and the next commands."""
    code, stderr = job.run("--sentinel-run-dir", "D", "--nproc-per-node", "2", job.script(SPEAK_TO_THE_RELAY))
    assert code == 0, stderr
    (incident,) = IncidentReader(job.place / "D").incidents()
    assert (incident.kind, incident.attribution) == (Kind.NONFINITE_GRADIENT, Attribution.RANK_LOCAL)
    assert (incident.step, incident.suspect_ranks) == (2, (1,))
    for said in (
        "1 incident",
        "step 2",
        "rank 1",
        "layer.weight",
        f"sentinel incidents show {incident.id} --run-dir D",
    ):
        assert said in stderr
    assert list((job.place / "D" / "spool").glob("*")) == []


def test_a_coordinator_that_cannot_listen_does_not_stop_the_job(job: Job) -> None:
    """A taken port costs the coordinator, not the training: one warning, reports in the spool, torchrun's exit code."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = job.here("--sentinel-bind", f"127.0.0.1:{port}", "--nproc-per-node", "2")
        code, stderr = job.run(*flags, job.script(SPEAK_TO_THE_RELAY))
    assert code == 0, stderr
    assert len([line for line in stderr.splitlines() if "sentinel: warning: the coordinator cannot start" in line]) == 1
    assert "Traceback" not in stderr
    kept = spooled_reports(job.run_dir)
    assert [(report.rank, report.step) for report in kept if isinstance(report, Evidence)] == [(1, 2)]
    assert [report.exit_code for report in kept if isinstance(report, NodeEnded)] == [0]
    assert str(job.run_dir / "spool") in stderr or "run/spool" in stderr
    assert job.record()["degraded"]


def test_a_run_directory_that_cannot_be_made_means_plain_torchrun(job: Job) -> None:
    """Without a place to write, the job runs unwatched after one line that says so."""
    (job.place / "file").touch()
    script = job.script(NOTE_ENVIRONMENT)
    code, stderr = job.run("--sentinel-run-dir", "file/below", "--nproc-per-node", "1", script)
    assert code == 0, stderr
    ours = [line for line in stderr.splitlines() if line.startswith("sentinel:")]
    assert len(ours) == 1
    assert ours[0].endswith("training goes on as plain torchrun, unwatched")
    assert "SENTINEL_AGENT" not in job.seen()["0-0"]["environ"]


def test_no_agent_is_plain_torchrun(job: Job) -> None:
    """--sentinel-no-agent leaves nothing of Sentinel: no files, no variables, no words."""
    code, stderr = job.run("--sentinel-no-agent", "--nproc-per-node", "1", job.script(NOTE_ENVIRONMENT))
    assert code == 0, stderr
    assert "sentinel:" not in stderr
    assert not [name for name in job.seen()["0-0"]["environ"] if name.startswith("SENTINEL_")]
    assert not (job.place / "sentinel-runs").exists()


def test_a_usage_error_is_one_line_and_exit_2(job: Job) -> None:
    """A flag nobody knows stops before anything starts, with a hint and without a traceback."""
    code, stderr = job.run("--nope", job.script("pass"))
    assert code == 2
    assert re.fullmatch(r"sentinel: error: .*--nope\nhint: .*\n", stderr)


def test_a_signal_that_comes_twice_does_not_cut_the_ending_short(job: Job) -> None:
    """A supervisor that signals a second time right after the first still gets the summary and a whole record."""
    script = job.script("""
        import os, time
        from pathlib import Path
        Path(os.environ["NOTES"], "ready").touch()
        time.sleep(60)
    """)
    process = job.start(*job.here("--nproc-per-node", "1", script))
    wait_for((job.notes / "ready").exists, "the worker")
    process.send_signal(signal.SIGTERM)
    said = ""
    assert process.stderr is not None
    while "SignalException: " not in said:  # torchrun is done; what follows is our ending
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "sentinel: no incidents" in rest
    assert job.record()["finished_at"] is not None
