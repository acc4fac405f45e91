"""Acknowledging an incident from the command line: by its running coordinator, or in the database of a run that is over.

Owns the choice between the two and how each fails.
"""

from __future__ import annotations

import getpass
import urllib.parse
from pathlib import Path

from sentinel.cli.act import coordinator, running_in
from sentinel.cli.output import fail
from sentinel.cli.source import Pages, newest_run
from sentinel.coordinator.acting import Acknowledgement
from sentinel.incidents.events import Acknowledged
from sentinel.incidents.model import Incident


def login() -> str:
    """Name of whoever runs this command, as far as the system knows it."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


def acknowledged(
    incident: Incident, word: Acknowledgement, run_dir: Path | None, http: str | None, token: str | None
) -> Incident:
    """The incident once the word is kept. Leaves with a hint if that cannot be."""
    if run_dir is None and http is not None:
        return _ask(coordinator(run_dir, http, token), incident, word)
    where = run_dir or newest_run()
    running = running_in(where)
    return _afterwards(where, incident, word) if running is None else _ask(running, incident, word)


def _ask(pages: Pages, incident: Incident, word: Acknowledgement) -> Incident:
    query = urllib.parse.urlencode({"run_id": incident.run_id})
    answer = pages.post(f"/api/v1/incidents/{urllib.parse.quote(incident.id, safe='')}/ack?{query}", word)
    return Incident.model_validate_json(answer)


def _afterwards(where: Path, incident: Incident, word: Acknowledgement) -> Incident:
    from sentinel.coordinator.aftermath import acknowledge

    try:
        kept = acknowledge(where, incident.run_id, Acknowledged(incident.id, word.by, word.note))
    except OSError as error:
        fail(f"cannot write to {where} ({error.strerror or error})", "is the folder writable for you?")
    return kept or incident
