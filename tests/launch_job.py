"""Launchers in processes of their own, with scripts and run directories below one folder (helpers of e2e tests)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from sentinel.launch.spool import read_spool
from sentinel.wire.codec import decode_reports
from sentinel.wire.messages import Report

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
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 10000  # the relay may be slow to come to it on a busy machine
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
    context.term()
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


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spooled_reports(run_dir: Path) -> list[Report]:
    """Every report that a run left in its spool."""
    (path,) = (run_dir / "spool").iterdir()
    return [report for _, frame in read_spool(path) for report in decode_reports(frame)]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until ``condition`` holds; fails the test at the deadline."""
    deadline = time.monotonic() + SECONDS / 2
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
