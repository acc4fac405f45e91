"""A rank that is frozen in the middle of a training is named while the others wait for it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_job import SECONDS, Job, wait_for

from sentinel.coordinator.store import IncidentReader

pytestmark = pytest.mark.e2e

# The coordinator's patience with a rank that says nothing, cut short.
IMPATIENT = (
    sys.executable,
    "-c",
    "from sentinel.incidents import silence; silence.SILENT_SECONDS = 3.0; silence.HEARD_SECONDS = 2.0\n"
    "from sentinel.cli.main import main; raise SystemExit(main())",
    "run",
)

FREEZE = """
    import os, signal, torch, torch.distributed as dist
    from pathlib import Path
    from torch.nn.parallel import DistributedDataParallel
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        if step == 4 and dist.get_rank() == 1:
            Path(os.environ["NOTES"], "frozen").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job whose launcher is gone after the test."""
    job = Job(tmp_path)
    yield job
    job.end()


def test_a_frozen_rank_is_named_and_may_go_on(job: Job) -> None:
    """Three ranks, one stopped at step 4: it is the suspect, at that step; once it goes on the training ends as it would have."""
    flags = job.here("--nproc-per-node", "3")
    options = {"SENTINEL_AGENT_OPTIONS": '{"alive_seconds": 0.2}'}
    launcher = job.start(*flags, job.script(FREEZE), launcher=IMPATIENT, **options)
    frozen = job.notes / "frozen"
    wait_for(lambda: frozen.exists() and frozen.read_text() != "", "the rank is frozen")
    wait_for(lambda: bool(IncidentReader(job.run_dir).incidents()), "the frozen rank is told")
    os.kill(int(frozen.read_text()), signal.SIGCONT)
    _, said = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0, said
    (incident,) = IncidentReader(job.run_dir).incidents()
    assert (incident.kind, incident.suspect_ranks, incident.step) == ("rank_silent", (1,), 4)
    assert "nothing was heard of rank 1" in said
    assert "1 incident" in said
