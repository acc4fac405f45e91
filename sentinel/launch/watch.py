"""Everything of Sentinel that runs beside one launch: run directory, coordinator, relay and the workers' environment.

Owns their order at start and end, and the rule that none of them can stop the user's training: what does not start is said in
one line, noted in ``run.json``, and done without.
"""

from __future__ import annotations

import platform
import secrets
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import zmq

from sentinel import __version__
from sentinel.coordinator.app import Coordinator
from sentinel.incidents.model import Incident
from sentinel.launch import console, summary
from sentinel.launch.discovery import Announcement, announce
from sentinel.launch.embedded import CoordinatorRefused, judged, start_coordinator
from sentinel.launch.halted import HALTED, forget
from sentinel.launch.injection import AgentMissing, WorkerContext, site_directory, worker_environment
from sentinel.launch.options import LaunchOptions, export
from sentinel.launch.pages import ReportFailed, write_report
from sentinel.launch.record import RunRecord, default_run_directory, make_run_directory, new_run_id, redacted, utc_now
from sentinel.launch.relay import Drained, Relay, RelayIdentity
from sentinel.launch.rendezvous import Invitation, NoRendezvous, Rendezvous, meet, meeting_point
from sentinel.wire.link import Join
from sentinel.wire.names import SPOOL

DRAIN_SECONDS = 5.0
PARTS_SECONDS = 120.0
GUESTS_SECONDS = 10.0  # torchrun's exit barrier has already brought the nodes together
STOP_SECONDS = 10.0

FAILURES = (OSError, RuntimeError, ValueError, ImportError, zmq.ZMQError, sqlite3.Error)
"""What a part of ours may fail with: files, ports, threads, settings, sockets, the database."""


@dataclass(slots=True)
class Watch:
    """What runs beside the job."""

    options: LaunchOptions
    run_dir: Path
    record: RunRecord
    relay: Relay
    coordinator: Coordinator | None = None
    rendezvous: Rendezvous | None = None
    announcement: Announcement | None = None


@dataclass(slots=True)
class _Start:
    """What is known so far while starting."""

    options: LaunchOptions
    run_dir: Path
    run_id: str
    node: int = 0
    join: Join | None = None
    coordinator: Coordinator | None = None
    rendezvous: Rendezvous | None = None
    degraded: list[str] = field(default_factory=list)

    def do_without(self, problem: str) -> None:
        """Say and note that a part of ours is missing."""
        self.degraded.append(problem)
        console.warn(problem, "training goes on")


def begin(options: LaunchOptions) -> Watch | None:
    """Start all that watches. None if the job must run unwatched; that was said then. Raises UsageError for wrong settings."""
    start = None
    try:
        nodes = options.nodes[1] if not options.torchrun.standalone else 1
        site_directory()
        name = new_run_id(utc_now())
        run_dir = options.run_dir or default_run_directory(name)
        make_run_directory(run_dir)
        forget(run_dir)
        start = _Start(options, run_dir, options.run_id or name, join=options.join)
        _find_coordinator(start, nodes)
        return _start_relay(start)
    except FAILURES as error:
        if start is not None and start.coordinator is not None:
            start.coordinator.stop(STOP_SECONDS)
        console.warn(_reason(error), "training goes on as plain torchrun, unwatched")
        return None


def finish(watch: Watch, exit_code: int) -> None:
    """Bring home what is under way, stop everything, and say what was found. Never changes the job's end."""
    try:
        drained = _bring_home(watch, exit_code)
        outcome = _outcome(watch, drained, exit_code)
        watch.record = watch.record.model_copy(
            update={
                "finished_at": utc_now(),
                "exit_code": exit_code,
                "unsent_critical": drained.unsent_critical,
                "drops": drained.drops,
            }
        )
        watch.record.write(watch.run_dir)
    except FAILURES as error:
        console.warn(
            f"the end of the run could not be recorded: {_reason(error)}", "the exit code is the training's own"
        )
        return
    alarm = bool(outcome.incidents)
    if alarm or drained.unsent_critical or not watch.options.quiet:
        console.say_block(summary.closing(outcome), alarm)
    if outcome.incidents:
        _leave_report(watch, outcome.incidents)


def _leave_report(watch: Watch, incidents: Sequence[Incident]) -> None:
    try:
        path = write_report(watch.run_dir, watch.record.run_id, incidents)
    except ReportFailed as failure:
        console.warn(f"no report was written ({failure})", "sentinel incidents show has the same facts")
    else:
        console.say(f"report: {summary.shown(path)}")


def _find_coordinator(start: _Start, nodes: int) -> None:
    """A coordinator given, found through the rendezvous, or embedded here: ``start.join`` says how to reach it."""
    if nodes > 1:
        try:
            start.rendezvous = meet(meeting_point(start.options.torchrun))
            if not start.rendezvous.hosting:
                _be_a_guest(start, start.rendezvous)
                return
        except NoRendezvous as error:
            start.do_without(f"the nodes share no coordinator ({error})")
            start.node = max(int(start.options.torchrun.node_rank), 0)
            return
    if start.join is None:
        _embed(start)
    if start.rendezvous is not None:
        start.node = start.rendezvous.node
        start.rendezvous.invite(Invitation(start.run_id, start.join))


def _be_a_guest(start: _Start, rendezvous: Rendezvous) -> None:
    invitation = rendezvous.accept()
    start.node = rendezvous.node
    start.run_id = start.options.run_id or invitation.run_id
    start.join = start.join or invitation.join
    if start.join is None:
        start.do_without("the node that hosts the rendezvous has no coordinator")


def _embed(start: _Start) -> None:
    host = start.rendezvous.host if start.rendezvous else None
    try:
        start.coordinator = start_coordinator(start.options, start.run_dir, start.run_id, host)
        start.join = start.coordinator.join
    except CoordinatorRefused as error:
        start.do_without(str(error))
    except (*FAILURES, NoRendezvous) as error:
        start.do_without(
            f"the coordinator cannot start ({_reason(error)}), reports are kept in {start.run_dir / SPOOL}"
        )


def _start_relay(start: _Start) -> Watch:
    options, join = start.options, start.join
    identity = RelayIdentity(start.run_id, start.node, options.world_size)
    relay = Relay(identity, join, start.run_dir).start()
    command_key = join.command_key if join else secrets.token_hex(32)
    context = WorkerContext(start.run_id, start.run_dir, start.node, relay.address, command_key)
    record = _record(start)
    try:
        record.write(start.run_dir)
        export(worker_environment(context, options))
    except (OSError, AgentMissing):
        relay.stop()
        raise
    if not options.quiet:
        console.say(summary.opening(start.run_id, start.run_dir, join.http if join else None))
    return Watch(options, start.run_dir, record, relay, start.coordinator, start.rendezvous, _announce(start))


def _announce(start: _Start) -> Announcement | None:
    """Let a Prometheus find this run's own coordinator; a folder that cannot be written costs only that."""
    if start.coordinator is None or start.coordinator.http_url is None:
        return None
    try:
        announced = announce(start.coordinator.http_url, start.run_id, start.run_dir, start.options.targets_dir)
    except OSError as error:
        start.do_without(f"no Prometheus will find this run ({_reason(error)})")
        return None
    if start.options.targets_dir is not None:
        start.coordinator.expect_scraper()
    return announced


def _record(start: _Start) -> RunRecord:
    source = "embedded" if start.coordinator else "joined" if start.join else "none"
    return RunRecord(
        run_id=start.run_id,
        node=start.node,
        argv=redacted(start.options.argv),
        versions={"sentinel": __version__, "torch": torch.__version__, "python": platform.python_version()},
        started_at=utc_now(),
        endpoint=start.join.endpoint if start.join else None,
        http=start.join.http if start.join else None,
        coordinator=source,
        world_size=start.options.world_size,
        degraded=tuple(start.degraded),
    )


def _bring_home(watch: Watch, exit_code: int) -> Drained:
    """The reports first, then the other nodes' reports, then the coordinator's judgement."""
    watch.relay.node_ended(exit_code)
    watch.relay.drain(DRAIN_SECONDS)
    came = _exchange_parts(watch)
    if watch.rendezvous is not None:
        if watch.rendezvous.hosting:
            watch.rendezvous.wait_for_guests(GUESTS_SECONDS)
            if came:
                _exchange_parts(watch)  # of guests that were late
        else:
            watch.rendezvous.leave()
    if watch.coordinator is not None:
        watch.coordinator.let_scraper_see()  # while it is still a target
    if watch.announcement is not None:
        watch.announcement.withdraw()
    if watch.coordinator is not None:
        watch.coordinator.stop(STOP_SECONDS)
    if watch.relay.refused:
        console.warn("the coordinator refused this launcher's keys", "its reports stay in the spool")
    drained = watch.relay.stop()
    if watch.relay.failure:
        console.warn(f"the relay stopped early ({watch.relay.failure})", "later reports of this node are lost")
    return drained


def _exchange_parts(watch: Watch) -> bool:
    """Parts of bundles go to the coordinator's host: take in other nodes', or lend ours for as long as they are asked for.

    False if that took too long.
    """
    if watch.coordinator is not None:
        came = watch.coordinator.let_parts_come(PARTS_SECONDS, _tell_parts)
        if not came:
            console.warn("parts of other nodes did not come in time", "they stay in those nodes' run directories")
        return came
    deadline = time.monotonic() + PARTS_SECONDS
    while watch.relay.lending and time.monotonic() < deadline:
        time.sleep(0.05)
    return not watch.relay.lending


def _tell_parts(parts: int, have: int, size: int) -> None:
    console.say(
        f"{parts} parts of other nodes' ranks are on their way: {have / 1e6:.1f} of {size / 1e6:.1f} MB are here"
    )


def _outcome(watch: Watch, drained: Drained, exit_code: int) -> summary.RunOutcome:
    record = watch.record
    if watch.coordinator is None:
        return summary.RunOutcome(watch.run_dir, None, drained=drained, http=record.http, elsewhere=record.endpoint)
    found = judged(watch.run_dir, record.run_id)
    return summary.RunOutcome(
        watch.run_dir,
        found.incidents,
        found.rounds_checked,
        found.benign_skips,
        drained,
        http=record.http,
        unwatched_ranks=found.unwatched_ranks,
        guard_skips=found.guard_skips,
        halted=exit_code == HALTED,
    )


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
