"""The coordinator as a whole: start, restart, bundles, many runs, stop."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from relay_client import RelayClient, closed, evidence, fault_of, hello, wait_until

from sentinel.bundle.manifest import PART_FILE, Environment, PartHeader
from sentinel.bundle.reader import Bundle
from sentinel.bundle.verify import verify
from sentinel.coordinator import fetches
from sentinel.coordinator.app import Coordinator, RunDirectoryBusy
from sentinel.coordinator.config import CoordinatorSettings
from sentinel.coordinator.limits import LimitTooLow, raise_open_files
from sentinel.coordinator.run import Run
from sentinel.coordinator.store import IncidentReader, with_ticks
from sentinel.incidents.events import Received
from sentinel.incidents.tracker import Tracker
from sentinel.wire.link import Join
from sentinel.wire.messages import DumpRequest, NodeEnded, PartWritten

MakeRelay = Callable[..., RelayClient]


def write_part(run_dir: Path, rank: int, run_id: str = "run", round_: int = 0) -> PartWritten:
    """Writes a rank's part as the agent would, and the report of it."""
    part = run_dir / "bundles" / f"a0-r{round_:06d}" / f"rank-{rank:05d}"
    part.mkdir(parents=True)
    environment = Environment(argv=("t.py",), cwd="/", python="3", torch="2", host="h", pid=1)
    header = PartHeader(
        run_id=run_id,
        attempt=0,
        rank=rank,
        world_size=2,
        node=0,
        round=round_,
        step=round_,
        state_after_step=False,
        reason="evidence",
        written_at=1.0,
        environment=environment,
    )
    (part / PART_FILE).write_text(header.model_dump_json())
    return PartWritten(0, rank, round_, round_, 0, str(part), 10, 0.1)


def test_the_join_file_is_private_and_leads_here(coordinator: Coordinator, relays: MakeRelay) -> None:
    """A launcher needs nothing but the file."""
    path = coordinator.run_dir / "join.json"
    assert path.stat().st_mode & 0o777 == 0o600
    relay = relays(Join.read(path))
    relay.await_ack(relay.send([evidence(0)]))


def test_parts_become_a_bundle_that_verifies_and_the_incident_knows_it(
    coordinator: Coordinator, relays: MakeRelay
) -> None:
    """Evidence, a dump request, two parts: a complete manifest, and its path in the incident."""
    relay = relays(coordinator.join)
    relay.send([hello(0), hello(1)])
    relay.send(fault_of(1))
    request = relay.await_command(DumpRequest)
    assert isinstance(request, DumpRequest)
    relay.send([write_part(coordinator.run_dir, rank) for rank in request.ranks])
    wait_until(lambda: (coordinator.run_dir / "bundles/a0-r000000/manifest.json").exists(), "the manifest is written")
    [incident] = coordinator.incidents()
    assert incident.bundle is not None
    bundle = Bundle.open(coordinator.run_dir / incident.bundle)
    assert not bundle.partial
    assert bundle.manifest is not None
    assert bundle.manifest.incidents == (incident.id,)
    assert verify(bundle.path) == []
    wait_until(lambda: coordinator.snapshot().runs[0].bundles == 1, "the commit is counted")


def test_a_bundle_whose_last_part_never_comes_is_partial_after_stop(
    settings: CoordinatorSettings, relays: MakeRelay
) -> None:
    """The end of the run commits what is there and names who is missing."""
    coordinator = Coordinator(settings).start()
    relay = relays(coordinator.join)
    relay.send([hello(0), hello(1)])
    relay.send(fault_of(1))
    relay.await_ack(relay.send([write_part(coordinator.run_dir, 1)]))
    assert coordinator.stop(10)
    bundle = Bundle.open(coordinator.run_dir / "bundles/a0-r000000")
    assert (bundle.partial, bundle.missing_ranks) == (True, (0,))


def test_a_directory_named_by_a_peer_is_not_written_into(
    coordinator: Coordinator, relays: MakeRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that claims to lie elsewhere, and that nobody hands over, makes the bundle partial; nothing appears there."""
    monkeypatch.setattr(fetches, "PATIENCE_SECONDS", 0.2)
    (tmp_path / "victim").mkdir()
    relay = relays(coordinator.join)
    relay.send([hello(0), hello(1)])
    relay.send(fault_of(1))
    relay.send([PartWritten(0, rank, 0, 0, 0, str(tmp_path / "victim"), 1, 0.1) for rank in (0, 1)])
    wait_until(lambda: (coordinator.run_dir / "bundles/a0-r000000/manifest.json").exists(), "the manifest is written")
    bundle = Bundle.open(coordinator.run_dir / "bundles/a0-r000000")
    assert bundle.missing_ranks == (0, 1)
    assert list((tmp_path / "victim").iterdir()) == []


def test_one_coordinator_for_each_run_directory(coordinator: Coordinator, settings: CoordinatorSettings) -> None:
    """A second one is refused in one line and harms nothing of the first."""
    before = (coordinator.run_dir / "join.json").read_text()
    with pytest.raises(RunDirectoryBusy, match="another coordinator"):
        Coordinator(settings).start()
    assert (coordinator.run_dir / "join.json").read_text() == before


def test_a_standalone_coordinator_serves_many_runs_and_keeps_them_apart(tmp_path: Path, relays: MakeRelay) -> None:
    """Same rounds, same ids, two runs: two incidents, and bundles in a place of their own."""
    with Coordinator(CoordinatorSettings(run_dir=tmp_path, http_enabled=False)) as coordinator:
        for run_id in ("first", "second"):
            relay = relays(coordinator.join, run_id=run_id, relay=run_id)
            relay.send([hello(0), hello(1)])
            relay.await_ack(relay.send(fault_of(1)))
        assert [i.run_id for i in coordinator.incidents()] == ["first", "second"]
        assert [i.run_id for i in coordinator.incidents("second")] == ["second"]
        directories = {run.directory for run in coordinator._intake.runs.values()}
        assert len(directories) == 2
        assert all(d.parent == tmp_path / "runs" for d in directories)


def test_a_launchers_own_directory_gets_the_manifest_of_a_standalone_coordinator(
    tmp_path: Path, relays: MakeRelay
) -> None:
    """Parts that a launcher's ranks wrote on this host are committed where they lie."""
    launcher = tmp_path / "launcher"
    with Coordinator(CoordinatorSettings(run_dir=tmp_path / "coordinator", http_enabled=False)) as coordinator:
        relay = relays(coordinator.join)
        relay.send([hello(0), hello(1)])
        relay.send(fault_of(1))
        relay.send([write_part(launcher, rank) for rank in (0, 1)])
        wait_until(lambda: (launcher / "bundles/a0-r000000/manifest.json").exists(), "the manifest is written")
    assert not Bundle.open(launcher / "bundles/a0-r000000").partial


def test_too_many_runs_are_refused_and_an_ended_one_makes_room(tmp_path: Path, relays: MakeRelay) -> None:
    """Run ids are a peer's to choose, so their number is bounded."""
    settings = CoordinatorSettings(run_dir=tmp_path, http_enabled=False, max_runs=2)
    with Coordinator(settings) as coordinator:
        for run_id in ("first", "second"):
            relay = relays(coordinator.join, run_id=run_id, relay=run_id)
            relay.await_ack(relay.send([evidence(0)]))
        third = relays(coordinator.join, run_id="third", relay="third")
        third.send([hello(0)])
        wait_until(lambda: coordinator.snapshot().rejected.get("runs"), "the third run is refused")
        coordinator._server.ask(lambda: coordinator._intake._end(coordinator._intake.runs["first"], 1.0), 5)
        third.await_ack(third.send([evidence(0)]))
        assert set(coordinator._intake.runs) == {"second", "third"}


def test_a_run_ends_when_its_nodes_have_and_starts_again_with_new_reports(
    tmp_path: Path, relays: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is on disk; a restarted job opens the same run again."""
    monkeypatch.setattr("sentinel.coordinator.run.END_AFTER_SECONDS", 0.2)
    with Coordinator(CoordinatorSettings(run_dir=tmp_path, http_enabled=False)) as coordinator:
        relay = relays(coordinator.join)
        relay.send([hello(0), closed(0)])
        relay.await_ack(relay.send([NodeEnded(0, 0, 0)]))

        def ended() -> bool:
            with IncidentReader(tmp_path) as reader:
                return reader.runs()[0].ended_at is not None

        wait_until(ended, "the run ends")
        relay.await_ack(relay.send([evidence(0, 1)]))
        assert not ended()


CHILD = """
import sys, time
from pathlib import Path
from sentinel.coordinator.app import Coordinator
from sentinel.coordinator.config import CoordinatorSettings
coordinator = Coordinator(CoordinatorSettings(run_dir=Path(sys.argv[1]), bind=sys.argv[2], http_enabled=False)).start()
print(coordinator.join.endpoint, flush=True)
time.sleep(600)
"""


def test_a_killed_coordinator_comes_back_with_its_keys_and_judges_what_it_had_acknowledged(
    tmp_path: Path, relays: MakeRelay
) -> None:
    """kill -9 between evidence and verdict: the same relay reconnects, and the incident names the rank."""
    arguments = [sys.executable, "-c", CHILD, str(tmp_path)]
    child = subprocess.Popen([*arguments, "tcp://127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    endpoint = child.stdout.readline().strip()
    join = Join.read(tmp_path / "join.json")
    relay = relays(join)
    relay.send([hello(0), hello(1)])
    first = relay.send([evidence(1), closed(1, evidence=1)])
    relay.await_ack(first)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    settings = CoordinatorSettings(run_dir=tmp_path, bind=endpoint, http_enabled=False)
    with Coordinator(settings) as coordinator:
        assert coordinator.join == join
        relay.acks.clear()
        relay.send([evidence(1), closed(1, evidence=1)], first)
        relay.await_ack(first)
        relay.send([closed(0)])
        wait_until(coordinator.incidents, "the open round is judged")
        [incident] = coordinator.incidents()
        assert (incident.suspect_ranks, incident.occurrences) == ((1,), 1)
        assert coordinator.snapshot().runs[0].reports == 5


def test_a_restart_opens_no_second_incident_for_a_known_fault(tmp_path: Path, relays: MakeRelay) -> None:
    """What was judged before the restart is known after it, by the same id."""
    settings = CoordinatorSettings(run_dir=tmp_path, http_enabled=False)
    coordinator = Coordinator(settings).start()
    relay = relays(coordinator.join)
    relay.send([hello(0), hello(1)])
    relay.await_ack(relay.send(fault_of(1)))
    before = coordinator.incidents()
    assert coordinator.stop(10)
    with Coordinator(settings) as again:
        assert [i.id for i in again.incidents()] == [i.id for i in before]
        assert again.snapshot().runs[0].incidents == {("nonfinite_gradient", "critical"): 1}
        assert [run.run_id for run in IncidentReader(tmp_path).runs() if run.ended_at is None] == ["run"]


def test_a_run_nobody_ended_is_over_after_a_day(tmp_path: Path) -> None:
    """A job that was killed outright does not stay open for good; a node that is only restarting does."""
    run = Run("run", "key", tmp_path, 0.0)
    run.feed(Received(hello(0)), 10.0)
    run.feed(Received(closed(0)), 20.0)
    assert not run.is_over(20.0 + 3600)
    assert run.is_over(20.0 + 25 * 3600)
    run.feed(Received(NodeEnded(0, 0, 1)), 30.0)
    assert run.is_over(61.0)
    run.feed(Received(msgspec.structs.replace(hello(0), attempt=1)), 62.0)
    assert not run.is_over(3600.0)


def test_the_event_log_gives_the_same_verdicts_to_the_same_core(coordinator: Coordinator, relays: MakeRelay) -> None:
    """A post-mortem that feeds the log to a new tracker comes to the incidents that are on disk."""
    relay = relays(coordinator.join)
    relay.send([hello(0), hello(1)])
    for round_ in range(3):
        relay.send([closed(0, round_), closed(1, round_)])
    relay.await_ack(relay.send(fault_of(1, 3)))
    stored = coordinator.incidents()
    tracker = Tracker("run")
    with IncidentReader(coordinator.run_dir) as reader:
        for entry in with_ticks(reader.events("run")):
            tracker.handle(entry.event, entry.at)
    assert [i.model_dump() for i in tracker.incidents.values()] == [i.model_dump() for i in stored]


def test_a_file_limit_that_cannot_hold_the_relays_stops_the_start() -> None:
    """Too few descriptors would leave relays unheard; the start says both numbers, and otherwise raises the limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert raise_open_files(1) == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    if hard == resource.RLIM_INFINITY:
        return
    with pytest.raises(LimitTooLow, match=str(hard)):
        raise_open_files(hard)


def test_files_of_the_run_directory_are_private(coordinator: Coordinator, relays: MakeRelay) -> None:
    """Evidence may hold a user's numbers: nothing in the run directory is for others."""
    relay = relays(coordinator.join)
    relay.await_ack(relay.send([evidence(0)]))
    for path in coordinator.run_dir.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path.name
    assert coordinator.run_dir.stat().st_mode & 0o777 == 0o700


def test_the_join_file_says_what_the_coordinator_says(coordinator: Coordinator) -> None:
    """File and property are one."""
    written = json.loads((coordinator.run_dir / "join.json").read_text())
    assert Join.model_validate(written) == coordinator.join
