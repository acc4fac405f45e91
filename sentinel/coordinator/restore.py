"""Taking up after a restart: runs that had not ended are fed their own event log, so that acknowledged evidence is still judged.

Owns which runs are taken up, and comparing what the core says now with what is on disk. Runs before the loop starts.
"""

from __future__ import annotations

from pathlib import Path

from sentinel.coordinator.actions import Actions
from sentinel.coordinator.directories import run_directory
from sentinel.coordinator.faults import Fault, Faults
from sentinel.coordinator.intake import Intake
from sentinel.coordinator.journal import Journal
from sentinel.coordinator.run import Run
from sentinel.coordinator.store import IncidentReader, RunRecord, with_ticks
from sentinel.incidents.events import CommitBundle, Expect, SaveIncident
from sentinel.incidents.model import Incident
from sentinel.wire.link import COMMAND_LIFETIME_SECONDS


def restore(
    reader: IncidentReader,
    intake: Intake,
    journal: Journal,
    actions: Actions,
    faults: Faults,
    run_dir: Path,
    now: float,
) -> None:
    """Bring back every run that had not ended. A run that cannot be read back is counted and starts empty."""
    for record in reader.runs():
        if record.ended_at is None:
            run = faults.guard(Fault.RESTORE, _restore_run, reader, record, actions, run_dir, now)
            if run is not None:
                intake.adopt(run)
        for relay, sequence in reader.deliveries(record.run_id):
            journal.deliveries.committed((record.run_id, relay, sequence))


def _restore_run(reader: IncidentReader, record: RunRecord, actions: Actions, run_dir: Path, now: float) -> Run:
    owner = reader.owner(record.run_id)
    run = Run(
        record.run_id, owner, run_directory(run_dir, record.run_id, standalone=True), record.started_at.timestamp()
    )
    stored = {incident.id: incident for incident in reader.incidents(record.run_id)}
    newest: dict[str, SaveIncident] = {}
    bundles: dict[str, CommitBundle] = {}
    for entry in with_ticks(reader.events(record.run_id)):
        if isinstance(entry.event, Expect):
            run.note_world_size(entry.event.world_size)
        for command in run.feed(entry.event, entry.at):
            if isinstance(command, SaveIncident):
                newest[command.incident.id] = command
            elif isinstance(command, CommitBundle):
                bundles[command.bundle] = command
            elif now - entry.at < COMMAND_LIFETIME_SECONDS:
                actions.carry_out(run, [command], now)
    actions.carry_out(run, [save for id_, save in newest.items() if _differs(save.incident, stored.get(id_))], now)
    actions.carry_out(run, [command for command in bundles.values() if not actions.is_committed(run, command)], now)
    return run


def _differs(incident: Incident, stored: Incident | None) -> bool:
    return stored is None or incident.model_dump(exclude={"updated_at"}) != stored.model_dump(exclude={"updated_at"})
