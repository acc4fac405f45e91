"""``sentinel run`` with a coordinator elsewhere: on another node of the job, or running by itself.

Two nodes are two launchers on this machine with run directories of their own.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from launch_job import SECONDS, SPEAK_TO_THE_RELAY, TORCHRUN, Job, free_port, spooled_reports, wait_for
from slow_link import SlowLink

from sentinel.bundle.reader import Bundle
from sentinel.bundle.verify import verify
from sentinel.coordinator.store import IncidentReader
from sentinel.wire.link import Join
from sentinel.wire.messages import Evidence

pytestmark = pytest.mark.e2e

# A short real training in which one image of rank 1 is NaN at step 3; ``width`` sizes the parameters that are dumped.
TRAIN = """
    import os, sys, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    width = int(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        batch = torch.randn(4, 8)
        if step == 3 and dist.get_rank() == int(os.environ.get("GUILTY", 1)):
            batch[2] = float("nan")
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
"""

# The launcher's patience with a host that says nothing, cut short.
IMPATIENT = (
    sys.executable,
    "-c",
    "from sentinel.launch import rendezvous; rendezvous.JOIN_SECONDS = 1.0\n"
    "from sentinel.cli.main import main; raise SystemExit(main())",
    "run",
)


# The launcher's patience with parts that are fetched, cut short.
HURRIED = (
    sys.executable,
    "-c",
    "from sentinel.launch import watch; watch.PARTS_SECONDS = 4.0\n"
    "from sentinel.cli.main import main; raise SystemExit(main())",
    "run",
)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job whose launchers are gone after the test."""
    job = Job(tmp_path)
    yield job
    job.end()


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_two_nodes_share_one_coordinator(job: Job, rendezvous: str) -> None:
    """Two launchers meet through the job's own rendezvous: one coordinator judges both nodes' ranks, and both say where."""
    script, port = job.script(SPEAK_TO_THE_RELAY), free_port()

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


def test_a_node_beside_plain_torchrun_goes_on_alone(job: Job) -> None:
    """If the host's launcher is not Sentinel's, the guest waits its time, says so once, and the job runs."""
    plain = job.script("pass", "plain.py")
    common = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    host = job.start(*common, "--node-rank", "0", plain, launcher=TORCHRUN)
    guest = job.here(*common, "--node-rank", "1", job.script(SPEAK_TO_THE_RELAY))
    code, stderr = job.run(*guest, launcher=IMPATIENT)
    host.communicate(timeout=SECONDS)
    assert (code, host.returncode) == (0, 0), stderr
    assert len([line for line in stderr.splitlines() if "the nodes share no coordinator" in line]) == 1
    assert any(isinstance(report, Evidence) for report in spooled_reports(job.run_dir))


def contents(bundle: Path) -> dict[str, bytes]:
    """Name -> content of every file below a bundle, but for its manifest."""
    found = {str(p.relative_to(bundle)): p.read_bytes() for p in bundle.rglob("*") if p.is_file()}
    return {name: content for name, content in found.items() if name != "manifest.json"}


def test_parts_of_other_nodes_come_to_the_coordinators(job: Job) -> None:
    """Nodes that share no file system: the bundle on the coordinator's host has every rank's part, bit by bit."""
    script, port = job.script(TRAIN), str(free_port())
    common = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port)
    launchers = [
        job.start(*("--sentinel-run-dir", str(job.place / f"node{n}")), *common, "--node-rank", str(n), script, "50000")
        for n in (0, 1)
    ]
    said = [launcher.communicate(timeout=SECONDS)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    here, there = (job.place / f"node{n}/bundles/a0-r000003" for n in (0, 1))
    bundle = Bundle.open(here)
    assert (bundle.partial, bundle.ranks) == (False, (0, 1))
    assert verify(here) == []
    assert len(contents(there)) == 5
    assert contents(there).items() <= contents(here).items()


@pytest.mark.parametrize(("width", "whole"), [(1_000, True), (500_000, False)], ids=["40 kB", "20 MB"])
def test_a_part_crosses_a_slow_link_or_is_missed(job: Job, width: int, whole: bool) -> None:
    """Over 1 Mbit/s a small part arrives beside the reports; a large one is missing from the bundle, and nothing hangs."""
    script, port, began = job.script(TRAIN), str(free_port()), time.monotonic()
    common = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port)
    here, there = job.place / "here", job.place / "there"
    words = (*common, "--node-rank", "0", script, str(width))
    launchers = [job.start("--sentinel-run-dir", str(here), *words, launcher=HURRIED)]
    wait_for((here / "join.json").exists, "the coordinator")
    join = Join.read(here / "join.json")
    link = SlowLink(int(join.endpoint.rpartition(":")[2]), bits=1e6)
    join.model_copy(update={"endpoint": f"tcp://127.0.0.1:{link.own}"}).write(job.place / "slow.json")
    own = ("--sentinel-run-dir", str(there), "--sentinel-join", str(job.place / "slow.json"))
    words = (*common, "--node-rank", "1", script, str(width))
    launchers.append(job.start(*own, *words, launcher=HURRIED))
    said = [launcher.communicate(timeout=SECONDS)[1] for launcher in launchers]
    link.close()
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    assert time.monotonic() - began < SECONDS
    (incident,) = IncidentReader(here).incidents()
    assert (incident.step, incident.suspect_ranks) == (3, (1,))
    bundle = Bundle.open(here / "bundles/a0-r000003")
    assert (bundle.partial, bundle.missing_ranks) == ((False, ()) if whole else (True, (1,)))
    assert verify(bundle.path) == []
    assert len(contents(there / "bundles/a0-r000003")) == 5
    assert ("parts of other nodes did not come in time" in said[0]) is not whole


@pytest.fixture
def coordinator(job: Job) -> subprocess.Popen[str]:
    """A coordinator in a process of its own, with its join file in place."""
    words = ("--run-dir", str(job.place / "c"), "--no-http")
    process = job.start(*words, launcher=(sys.executable, "-m", "sentinel.cli.main", "coordinator"))
    wait_for((job.place / "c" / "join.json").exists, "the coordinator")
    return process


def test_a_running_coordinator_is_joined(job: Job, coordinator: subprocess.Popen[str]) -> None:
    """With a join file no coordinator is started: the given one has the incident under the run's id."""
    flags = job.here("--sentinel-join", "c/join.json", "--sentinel-run-id", "mine", "--nproc-per-node", "2")
    code, stderr = job.run(*flags, job.script(SPEAK_TO_THE_RELAY))
    assert code == 0, stderr
    assert "incidents of this run are with the coordinator at tcp://" in stderr
    assert not (job.run_dir / "sentinel.db").exists()
    coordinator.terminate()
    coordinator.communicate(timeout=SECONDS)
    with IncidentReader(job.place / "c") as reader:
        incidents = reader.incidents("mine")
        assert len(incidents) == 1, list(reader.events("mine"))
    (incident,) = incidents
    assert (incident.step, incident.suspect_ranks) == (2, (1,))


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_coordinator_that_dies_or_freezes_costs_the_job_nothing(
    job: Job, coordinator: subprocess.Popen[str], fate: signal.Signals
) -> None:
    """The job ends by itself with its own exit code, and what was not acknowledged is on disk and counted."""
    pause = """
        if round_ == 1:
            open(os.path.join(os.environ["NOTES"], f"at-{rank}"), "w").close()
            while not os.path.exists(os.path.join(os.environ["NOTES"], "go")):
                time.sleep(0.02)
        guilty ="""
    script = job.script(
        SPEAK_TO_THE_RELAY.replace("        guilty =", pause, 1).replace("\n\n        if", "\n        if")
    )
    launcher = job.start(*job.here("--sentinel-join", "c/join.json", "--nproc-per-node", "2"), script)
    wait_for(lambda: len(list(job.notes.glob("at-*"))) == 2, "both ranks in round 1")
    coordinator.send_signal(fate)
    (job.notes / "go").touch()
    started = time.monotonic()
    _, stderr = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0, stderr
    assert time.monotonic() - started < 20.0
    assert "reached no coordinator; kept in" in stderr
    assert job.record()["unsent_critical"] > 0
    assert [(r.rank, r.step) for r in spooled_reports(job.run_dir) if isinstance(r, Evidence)] == [(1, 2)]


def test_a_coordinator_that_does_not_know_our_key_is_named(job: Job, coordinator: subprocess.Popen[str]) -> None:
    """Keys that are refused are said as that, and the reports stay."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    join = Join.read(job.place / "c" / "join.json")
    stranger = Join.model_validate(join.model_dump() | {"client_public": public, "client_secret": secret})
    stranger.write(job.place / "stranger.json")
    flags = job.here("--sentinel-join", "stranger.json", "--nproc-per-node", "2")
    code, stderr = job.run(*flags, job.script(SPEAK_TO_THE_RELAY))
    assert code == 0, stderr
    assert "the coordinator refused this launcher's keys" in stderr
    assert any(isinstance(report, Evidence) for report in spooled_reports(job.run_dir))
