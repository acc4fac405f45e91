"""Training scripts under the launcher, each run in processes of its own, and what Sentinel said of it.

Owns starting, ending and reading back; which script does what is in ``tests/e2e/scripts``. At most two runs at a time, or one for
each of several pytest workers: each is a launcher and its ranks, and the machines that run the tests have few cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from sentinel.coordinator.store import IncidentReader
from sentinel.incidents.events import Received
from sentinel.wire.messages import Counted, Report

SCRIPTS = Path(__file__).parent / "e2e" / "scripts"
CORPUS = Path(__file__).parent / "corpus"
SENTINEL = ("-m", "sentinel.cli.main")
TORCHRUN = ("-m", "torch.distributed.run")
RUN_SECONDS = 100.0  # of one training, on a machine that is busy with others
AT_ONCE = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2


@dataclass(frozen=True)
class Case:
    """One training: ``script`` (below ``tests/e2e/scripts`` unless absolute) with its arguments, and how it is started.

    ``options`` go to the agent, ``flags`` to the launcher. ``watched=False`` is plain torchrun.
    """

    script: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    options: tuple[tuple[str, Any], ...] = ()
    flags: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    watched: bool = True

    def __str__(self) -> str:
        """The name of a parametrised test: what tells it from the others."""
        return "-".join((*self.arguments, *(f"{name}={value}" for name, value in self.options))) or self.script


@dataclass(frozen=True)
class Ran:
    """A training that has ended. ``incidents`` is the contract's JSON, as another program reads it."""

    exit_code: int
    stdout: str
    stderr: str
    run_dir: Path
    seconds: float
    incidents: list[dict[str, Any]] = field(default_factory=list)

    @property
    def said(self) -> str:
        """Everything, for the message of a failed assertion."""
        return f"exit code {self.exit_code}\n{self.stdout}\n{self.stderr}\n{json.dumps(self.brief)}"

    @property
    def brief(self) -> list[tuple[Any, ...]]:
        """The incidents' verdicts: kind, stage, suspect ranks, step."""
        return [(i["kind"], i["stage"], tuple(i["suspect_ranks"]), i["step"]) for i in self.incidents]

    @cached_property
    def reports(self) -> list[Report]:
        """Every report that reached the run's own coordinator, in the order received."""
        with IncidentReader(self.run_dir) as reader:
            (run,) = reader.runs()
            return [e.event.report for e in reader.events(run.run_id) if isinstance(e.event, Received)]

    @cached_property
    def counts(self) -> dict[str, int]:
        """The run's totals (``rounds_checked``, ``benign_skips``, …)."""
        with IncidentReader(self.run_dir) as reader:
            (run,) = reader.runs()
            return run.counts

    @property
    def faults(self) -> Counter[str]:
        """What the agents swallowed, by reason, over all ranks."""
        return _total(self.reports, "faults")

    @property
    def drops(self) -> Counter[str]:
        """What the agents dropped, by reason, over all ranks."""
        return _total(self.reports, "drops")

    @property
    def record(self) -> dict[str, Any]:
        """``run.json``."""
        return json.loads((self.run_dir / "run.json").read_text())  # type: ignore[no-any-return]

    def printed(self, word: str) -> dict[int, str]:
        """Rank -> the rest of its last line that begins with ``[rank R] WORD``."""
        found = {}
        for line in self.stdout.splitlines():
            rank, _, rest = line.removeprefix("[rank ").partition("] ")
            if line.startswith("[rank ") and rest.startswith(f"{word} "):
                found[int(rank)] = rest.removeprefix(f"{word} ")
        return found


def marks(name: str, known: Mapping[str, str], racy: Mapping[str, str] | None = None) -> list[pytest.MarkDecorator]:
    """Expected failures of what is known not to be right, with its reason; what depends on threads may also pass."""
    if racy and name in racy:
        return [pytest.mark.xfail(strict=False, reason=racy[name])]
    return [pytest.mark.xfail(strict=True, reason=known[name])] if name in known else []


def _total(reports: list[Report], name: str) -> Counter[str]:
    last = {r.rank: getattr(r, name) for r in reports if isinstance(r, Counted)}
    total: Counter[str] = Counter()
    for counted in last.values():
        total.update(counted)
    return total


def environment(case: Case, python: str = sys.executable) -> dict[str, str]:
    """The environment of a training: this one's, with nothing left of another run, one thread per rank. Ranks run ``python``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "PET_", "PYTHONPATH"))}
    kept |= {"OMP_NUM_THREADS": "1", **dict(case.environ)}
    if python != sys.executable:
        kept["PYTHON_EXEC"] = python
    if case.options:
        kept["SENTINEL_AGENT_OPTIONS"] = json.dumps(dict(case.options))
    return kept


def command(case: Case, run_dir: Path, python: str = sys.executable) -> list[str]:
    """The command line of a training; ``--standalone`` lets the rendezvous choose a free port."""
    launcher = [*SENTINEL, "run", "--sentinel-run-dir", str(run_dir)] if case.watched else list(TORCHRUN)
    flags = ["--standalone", "--nproc-per-node", str(case.ranks), *case.flags]
    return [python, *launcher, *flags, str(SCRIPTS / case.script), *case.arguments]


def start(case: Case, place: Path, python: str = sys.executable) -> subprocess.Popen[str]:
    """Start a training in ``place``, for tests that meddle while it runs; end it with ``finish``."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words, env = command(case, place / "run", python), environment(case, python)
    return subprocess.Popen(words, cwd=place, env=env, **pipes)  # type: ignore[call-overload, no-any-return]


def finish(process: subprocess.Popen[str], place: Path, since: float, python: str = sys.executable) -> Ran:
    """Wait for a training's end and read back what was found. Raises TimeoutExpired, the training then being gone too."""
    try:
        stdout, stderr = process.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its workers with it
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    took, run_dir = time.monotonic() - since, place / "run"
    listed = incidents(run_dir, python) if run_dir.is_dir() else []
    return Ran(process.returncode, stdout, stderr, run_dir, took, listed)


def run(case: Case, place: Path | None = None, python: str = sys.executable) -> Ran:
    """Run a training to its end."""
    place = place or Path(tempfile.mkdtemp(prefix="run-"))
    since = time.monotonic()
    return finish(start(case, place, python), place, since, python)


def incidents(run_dir: Path, python: str = sys.executable) -> list[dict[str, Any]]:
    """``sentinel incidents ls -o json`` of a run directory; none if a coordinator elsewhere has them."""
    if not (run_dir / "sentinel.db").exists():
        return []
    words = [python, *SENTINEL, "incidents", "ls", "--run-dir", str(run_dir), "-o", "json", "--exit-zero"]
    listed = subprocess.run(words, capture_output=True, text=True, timeout=RUN_SECONDS, check=True)
    return json.loads(listed.stdout)["incidents"]  # type: ignore[no-any-return]


class Ahead:
    """Runs cases two at a time in the order given, so that each test finds its own under way. ``python`` runs them all."""

    def __init__(self, cases: list[Case], place: Path, python: str = sys.executable) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._ran: dict[Case, Future[Ran]] = {}
        for number, case in enumerate(dict.fromkeys(cases)):
            folder = place / str(number)
            folder.mkdir()
            self._ran[case] = self._pool.submit(run, case, folder, python)

    def of(self, case: Case) -> Ran:
        """The training of ``case``, once it has ended."""
        return self._ran[case].result()

    def close(self) -> None:
        """Start no more, and wait for those that run."""
        self._pool.shutdown(cancel_futures=True)
