"""``sentinel incidents``: list, show, acknowledge, export.

Owns the commands. The page of an incident is ``postmortem/incident_page.py``; the formats are ``postmortem/export.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from sentinel.cli.acknowledging import acknowledged, login
from sentinel.cli.options import Http, Output, RunDir, RunId, Token
from sentinel.cli.output import ExitCode, OutputFormat, fail, put, say
from sentinel.cli.source import RunDirectory, Source, choose
from sentinel.coordinator.acting import Acknowledgement
from sentinel.incidents.model import Incident, Kind, Severity, State
from sentinel.postmortem.export import ExportFormat, export_incidents, incident_table
from sentinel.postmortem.incident_page import describe_incident
from sentinel.postmortem.samples import odd_samples
from sentinel.postmortem.text import printable
from sentinel.postmortem.timeline import NEAR, TimelineRecord, timeline, timeline_records, timeline_text

incidents_app = typer.Typer(help="What went wrong, when, and on which ranks.", no_args_is_help=True)

IncidentId = Annotated[str, typer.Argument(metavar="ID", help="An incident's id, or the beginning of one.")]


@incidents_app.command("ls")
def list_incidents(
    run_dir: RunDir = None,
    http: Http = None,
    token: Token = None,
    run_id: RunId = None,
    kind: Annotated[list[Kind] | None, typer.Option("--kind", help="Only these kinds.")] = None,
    state: Annotated[list[State] | None, typer.Option("--state", help="Only these states.")] = None,
    exit_zero: Annotated[bool, typer.Option("--exit-zero", help="Exit 0 even if incidents are found.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List incidents, oldest first. Exits 3 if any of them is a warning or critical."""
    listed = choose(run_dir, http, token).incidents(run_id)
    kept = tuple(i for i in listed.incidents if (not kind or i.kind in kind) and (not state or i.state in state))
    listed = listed.model_copy(update={"incidents": kept})
    if output is OutputFormat.JSON:
        put(listed.model_dump_json(indent=1))
    elif kept:
        put(incident_table(kept))
    else:
        say("no incidents")
    if not exit_zero and any(incident.severity is not Severity.INFO for incident in kept):
        raise typer.Exit(int(ExitCode.INCIDENTS_FOUND))


@incidents_app.command("show")
def show_incident(
    incident_id: IncidentId,
    run_dir: RunDir = None,
    http: Http = None,
    token: Token = None,
    run_id: RunId = None,
    told_in_time: Annotated[bool, typer.Option("--timeline", help="What happened around it, in order.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show one incident: the verdict, what each rank saw, the bundle, and what to do next."""
    source = choose(run_dir, http, token)
    incident = find_incident(source, incident_id, run_id)
    if told_in_time:
        _put_timeline(source, incident, output)
        return
    if output is OutputFormat.JSON:
        put(incident.model_dump_json(indent=1))
        return
    put(describe_incident(incident, source.run_dir, odd_samples(incident, source.run_dir)))


@incidents_app.command("ack")
def acknowledge_incident(
    incident_id: IncidentId,
    run_dir: RunDir = None,
    http: Http = None,
    token: Token = None,
    run_id: RunId = None,
    by: Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who says so (default: your login).")] = None,
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="What there is to say of it.")] = "",
    output: Output = OutputFormat.TABLE,
) -> None:
    """Note that you have seen an incident, during the run or after it. The verdict stays as it is."""
    incident = find_incident(choose(run_dir, http, token), incident_id, run_id)
    said = acknowledged(incident, Acknowledgement(by=(by or login())[:64], note=note[:1000]), run_dir, http, token)
    if output is OutputFormat.JSON:
        put(said.model_dump_json(indent=1))
    else:
        put(f"incident {said.id}: acknowledged by {printable(said.acknowledged_by)}")


@incidents_app.command("export")
def export_incident(
    incident_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="One incident; without it, all.")] = None,
    run_dir: RunDir = None,
    http: Http = None,
    token: Token = None,
    run_id: RunId = None,
    form: Annotated[ExportFormat, typer.Option("--format", help="What to write.")] = ExportFormat.JSON,
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write there instead of stdout.")] = None,
) -> None:
    """Write incidents out whole, for a ticket (markdown), a pipeline (jsonl) or an archive (json)."""
    source = choose(run_dir, http, token)
    listed = source.incidents(run_id)
    if incident_id is not None:
        listed = listed.model_copy(update={"incidents": (find_incident(source, incident_id, run_id),)})
    written = export_incidents(listed, form, source.run_dir)
    if to is None:
        put(written)
        return
    try:
        to.write_text(written + "\n", encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {to} ({error.strerror})", "name a file in a folder that exists and is writable")
    say(f"{len(listed.incidents)} incident(s) written to {to}")


def _put_timeline(source: Source, incident: Incident, output: OutputFormat) -> None:
    if not isinstance(source, RunDirectory):
        fail("a coordinator's pages hold no event log", "name the run directory: --run-dir DIR")
    near = (when.timestamp() for when in (incident.opened_at - NEAR, incident.updated_at + NEAR))
    moments = timeline(incident, source.logged(incident.run_id, *near))
    if output is OutputFormat.JSON:
        put(TimelineRecord(incident=incident.id, moments=timeline_records(incident, moments)).model_dump_json(indent=1))
    else:
        put(timeline_text(incident, moments))


def find_incident(source: Source, beginning: str, run_id: str | None) -> Incident:
    """The incident with this id, or the only one whose id begins so. Leaves with a hint if there is not exactly one."""
    listed = source.incidents(run_id).incidents
    fits = [i for i in listed if i.id == beginning] or [i for i in listed if i.id.startswith(beginning)]
    if len(fits) != 1:
        _fail_not_one(fits, beginning)
    return fits[0]


def _fail_not_one(fits: list[Incident], beginning: str) -> NoReturn:
    if not fits:
        fail(f"no incident {beginning}", "sentinel incidents ls lists them")
    if len({incident.run_id for incident in fits}) > 1:
        fail(f"several runs have an incident {beginning}", f"choose one: --run-id {fits[-1].run_id}", ExitCode.USAGE)
    fail(f"{len(fits)} incidents begin with {beginning}", f"for instance {fits[0].id}", ExitCode.USAGE)
