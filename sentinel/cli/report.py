"""``sentinel report``: one page, text or JSON about an incident, a bundle, or all incidents of a run.

Owns the command: what is meant by its argument, and where the result goes. The report is ``postmortem/report/``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from sentinel.bundle.reader import Bundle, BundleRefused, bundle_directory
from sentinel.cli.incidents import find_incident
from sentinel.cli.options import Http, RunDir, RunId, Token
from sentinel.cli.output import ExitCode, fail, put, say
from sentinel.cli.source import RunDirectory, Source, choose
from sentinel.incidents.events import Event
from sentinel.postmortem.report.assemble import ReportFormat, facts_of_incidents, render, write_page
from sentinel.postmortem.report.facts import Facts, gather
from sentinel.wire.names import DATABASE


def report(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[INCIDENT|BUNDLE]", help="An incident's id, or a bundle; without it, the whole run."),
    ] = None,
    run_dir: RunDir = None,
    http: Http = None,
    token: Token = None,
    run_id: RunId = None,
    to: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there instead of stdout.")
    ] = None,
    form: Annotated[
        ReportFormat | None, typer.Option("--format", help="Default: by the file's ending; text without a file.")
    ] = None,
) -> None:
    """Report an incident, a bundle or a run: verdict, charts, the batch, what replay and lint found, what to do next."""
    facts, title = _facts(what, run_dir, http, token, run_id)
    written = render(facts, form or _form_of(to), title)
    if to is None:
        put(written)
        return
    try:
        write_page(to, written + "\n")
    except OSError as error:
        fail(f"cannot write {to} ({error.strerror})", "name a file in a folder that exists and is writable")
    say(f"report written to {to}")


def _form_of(to: Path | None) -> ReportFormat:
    ending = to.suffix.lower() if to else ""
    return {".html": ReportFormat.HTML, ".htm": ReportFormat.HTML, ".json": ReportFormat.JSON}.get(
        ending, ReportFormat.TEXT
    )


def _facts(
    what: str | None, run_dir: Path | None, http: str | None, token: str | None, run_id: str | None
) -> tuple[list[Facts], str]:
    if what is not None and Path(what).exists():
        return _facts_of_bundle(Path(what))
    source = choose(run_dir, http, token)
    if what is None:
        listed = source.incidents(run_id)
        return facts_of_incidents(listed.incidents, source.run_dir, _Log(source)), f"run {listed.run_id or ''}".strip()
    incident = find_incident(source, what, run_id)
    return facts_of_incidents([incident], source.run_dir, _Log(source)), f"incident {incident.id}"


def _facts_of_bundle(path: Path) -> tuple[list[Facts], str]:
    """A bundle's own report, with its incident if the run's database is where the bundle was written."""
    try:
        directory = bundle_directory(path)
        bundle = Bundle.open(directory)
    except BundleRefused as refusal:
        fail(
            str(refusal), "a bundle is a directory below RUN_DIR/bundles; sentinel dump ls lists them", ExitCode.REFUSED
        )
    run_dir = directory.parent.parent
    title = f"bundle {bundle.id}"
    if not (run_dir / DATABASE).is_file():
        return [gather(None, directory, None, ())], title
    source = RunDirectory(run_dir)
    own = [i for i in source.incidents(None).incidents if i.bundle and (run_dir / i.bundle).resolve() == directory]
    if not own:
        return [gather(None, directory, run_dir, ())], title
    return facts_of_incidents(own, run_dir, _Log(source)), title


class _Log:
    """The event log of a run, empty where only a coordinator's pages are read."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __call__(self, run_id: str, since: float, until: float) -> Iterable[Event]:
        return self._source.events(run_id, since, until) if isinstance(self._source, RunDirectory) else ()
