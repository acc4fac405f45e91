"""The report that a run leaves behind: `report.html` in the run directory, if there were incidents.

Owns the writing at the run's end, and its failures: a report that cannot be made never changes how the job ends. The report
itself is ``postmortem/report/``'s.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jinja2 import TemplateError

from sentinel.coordinator.store import IncidentReader
from sentinel.incidents.events import Event
from sentinel.incidents.model import Incident
from sentinel.postmortem.report.assemble import ReportFormat, facts_of_incidents, render, write_page
from sentinel.wire.names import REPORT_FILE

READ_SECONDS = 10.0  # the user waits for the exit code; a long log is read as far as this allows

FAILURES = (OSError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, sqlite3.Error, TemplateError)
"""What files, database, bundles and drawing may fail with."""


class ReportFailed(Exception):
    """The report could not be written; the text says why in one line."""


def write_report(run_dir: Path, run_id: str, incidents: Sequence[Incident]) -> Path:
    """Write the page about ``incidents`` into the run directory. Raises ReportFailed."""
    deadline = time.monotonic() + READ_SECONDS
    path = run_dir / REPORT_FILE
    try:
        facts = facts_of_incidents(incidents, run_dir, lambda *near: _events(run_dir, deadline, *near))
        write_page(path, render(facts, ReportFormat.HTML, f"run {run_id}") + "\n")
    except FAILURES as error:
        raise ReportFailed(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}") from error
    return path


def _events(run_dir: Path, deadline: float, run_id: str, since: float, until: float) -> Iterator[Event]:
    with IncidentReader(run_dir) as reader:
        for logged in reader.events(run_id, since, until):
            if time.monotonic() > deadline:
                return
            yield logged.event
