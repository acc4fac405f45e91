"""``sentinel run`` as a user meets it: real torchrun, real processes, a real coordinator.

The workers are small scripts without torch. Where reports matter, a worker speaks to the relay itself, as the agent would.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sentinel.coordinator.store import IncidentReader
from sentinel.incidents.model import Attribution, Kind
from sentinel.launch.spool import read_spool
from sentinel.wire.codec import decode_reports
from sentinel.wire.messages import Evidence, NodeEnded

pytestmark = pytest.mark.e2e

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SENTINEL = (sys.executable, "-m", "sentinel.cli.main", "run")
SECONDS = 90

NOTE_ENVIRONMENT = """
    import json, os, sys
    from pathlib import Path
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    seen = {"argv": sys.argv, "path": sys.path, "environ": dict(os.environ)}
    Path(os.environ["NOTES"], f"{attempt}-{rank}.json").write_text(json.dumps(seen))
"""

# A rank that reports as the agent does; rank 1 meets NaN in its own gradients in round 2.
SPEAK_TO_THE_RELAY = """
    import os, time, zmq
    from sentinel.wire.codec import encode_reports
    from sentinel.wire.messages import Check, ClosedBy, Evidence, Goodbye, Hello, Phase, RoundClosed
    rank, world, attempt = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    socket = zmq.Context().socket(zmq.DEALER)
    socket.linger = 2000
    socket.routing_id = f"rank-{attempt}-{rank}-{os.getpid()}".encode()
    socket.connect(os.environ["SENTINEL_RELAY"])
    node = int(os.environ["SENTINEL_NODE"])
    hello = Hello(attempt, rank, 0, node, world, os.getpid(), "host", "0", "2", time.time())
    socket.send(encode_reports([hello]))
    for round_ in range(5):
        guilty = rank == 1 and round_ == 2
        if guilty:
            check = Check(numel=10, nan=10, inf=0, absmax=0.0)
            socket.send(encode_reports([Evidence(
                attempt, rank, round_, round_, 0, Phase.RAW, time.time(), check, ("layer.weight",), 1)]))
        socket.send(encode_reports([RoundClosed(
            attempt, rank, round_, round_, ClosedBy.OPTIMIZER, time.time(), int(guilty), 1, loss=1.0)]))
    socket.send(encode_reports([Goodbye(attempt, rank, 4, True)]))
    socket.close()
    zmq.Context.instance().term()
"""


class Job:
    """Scripts and run directories of one test, and the launchers it started."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.notes = place / "notes"
        self.notes.mkdir()
        self.run_dir = place / "run"
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "PET_", "PYTHONPATH"))}
        self.environ |= {"NOTES": str(self.notes), "OMP_NUM_THREADS": "1"}
        self._launchers: list[subprocess.Popen[str]] = []

    def script(self, body: str, name: str = "train.py") -> str:
        """Write a training script."""
        path = self.place / name
        path.write_text(textwrap.dedent(body))
        return str(path)

    def start(self, *words: str, launcher: tuple[str, ...] = SENTINEL, **environ: str) -> subprocess.Popen[str]:
        """Start a launcher in the job's folder."""
        process = subprocess.Popen(
            [*launcher, *words],
            cwd=self.place,
            env=self.environ | environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._launchers.append(process)
        return process

    def run(self, *words: str, launcher: tuple[str, ...] = SENTINEL, **environ: str) -> tuple[int, str]:
        """Run a launcher to its end; exit code and stderr."""
        process = self.start(*words, launcher=launcher, **environ)
        _, stderr = process.communicate(timeout=SECONDS)
        return process.returncode, stderr

    def here(self, *words: str) -> tuple[str, ...]:
        """Flags for this job's own run directory, then ``words``."""
        return ("--sentinel-run-dir", str(self.run_dir), *words)

    def seen(self) -> dict[str, dict[str, object]]:
        """What each worker noted of its environment, by ``attempt-rank``."""
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.notes.glob("*.json"))}

    def record(self, run_dir: Path | None = None) -> dict[str, object]:
        """``run.json``."""
        return json.loads(((run_dir or self.run_dir) / "run.json").read_text())  # type: ignore[no-any-return]

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._launchers:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job whose launchers are gone after the test."""
    job = Job(tmp_path)
    yield job
    job.end()


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until ``condition`` holds; fails the test at the deadline."""
    deadline = time.monotonic() + SECONDS / 2
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


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
    script = job.script("import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)")
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
    return [re.sub(r"\d\d:\d\d:\d\d|pid: \d+|line \d+", "#", line) for line in kept]


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


def test_a_coordinator_that_cannot_listen_does_not_stop_the_job(job: Job, port: int) -> None:
    """A taken port costs the coordinator, not the training: one warning, reports in the spool, torchrun's exit code."""
    with socket.create_server(("127.0.0.1", port)):
        flags = job.here("--sentinel-bind", f"127.0.0.1:{port}", "--nproc-per-node", "2")
        code, stderr = job.run(*flags, job.script(SPEAK_TO_THE_RELAY))
    assert code == 0, stderr
    assert len([line for line in stderr.splitlines() if "sentinel: warning: the coordinator cannot start" in line]) == 1
    assert "Traceback" not in stderr
    (spooled,) = (job.run_dir / "spool").iterdir()
    kept = [report for _, frame in read_spool(spooled) for report in decode_reports(frame)]
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


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_two_nodes_share_one_coordinator(job: Job, port: int, rendezvous: str) -> None:
    """Two launchers meet through the job's own rendezvous: one coordinator judges both nodes' ranks, and both say where."""
    script = job.script(SPEAK_TO_THE_RELAY)

    def flags(node: int) -> tuple[str, ...]:
        own = ("--sentinel-run-dir", str(job.place / f"node{node}"), "--nnodes", "2", "--nproc-per-node", "1")
        if rendezvous == "c10d":
            return (*own, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job7")
        return (*own, "--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank", str(node))

    # The static guest comes first and has to wait for its host; with c10d whoever comes first hosts.
    launchers = {node: job.start(*flags(node), script) for node in (1, 0)}
    said = {node: launcher.communicate(timeout=SECONDS)[1] for node, launcher in launchers.items()}
    assert [launcher.returncode for launcher in launchers.values()] == [0, 0], said
    records = {node: job.record(job.place / f"node{node}") for node in (0, 1)}
    (host,) = [node for node, record in records.items() if record["coordinator"] == "embedded"]
    guest = 1 - host
    assert records[guest]["coordinator"] == "joined"
    assert records[guest]["endpoint"] == records[host]["endpoint"]
    assert records[guest]["run_id"] == records[host]["run_id"]
    assert (records[host]["node"], records[guest]["node"]) == (0, 1)
    assert host == 0 or rendezvous == "c10d"
    if rendezvous == "c10d":
        assert records[host]["run_id"] == "job7"
    (incident,) = IncidentReader(job.place / f"node{host}").incidents()
    assert (incident.step, incident.suspect_ranks, incident.world_size) == (2, (1,), 2)
    assert "1 incident" in said[host]
    assert "with the coordinator at" in said[guest]
    assert [record["unsent_critical"] for record in records.values()] == [0, 0]


def test_a_node_beside_plain_torchrun_goes_on_alone(job: Job, port: int) -> None:
    """If the host's launcher is not Sentinel's, the guest waits its time, says so once, and the job runs."""
    script = job.script(SPEAK_TO_THE_RELAY + "\n")
    plain = job.script("pass", "plain.py")
    common = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
    host = job.start(*common, "--node-rank", "0", plain, launcher=TORCHRUN)
    code, stderr = job.run(*job.here(*common, "--node-rank", "1", script))
    host.communicate(timeout=SECONDS)
    assert (code, host.returncode) == (0, 0), stderr
    assert len([line for line in stderr.splitlines() if "the nodes share no coordinator" in line]) == 1
    (spooled,) = (job.run_dir / "spool").iterdir()
    assert any(isinstance(r, Evidence) for _, frame in read_spool(spooled) for r in decode_reports(frame))
