"""A report from what there is: the incidents of a run, one of them, or a bundle alone.

Owns the three renderings' choice and the writing of a page. Events are handed in, since the database is the coordinator's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path

from sentinel.incidents.events import Event
from sentinel.incidents.model import Incident
from sentinel.postmortem.report.facts import Facts, gather
from sentinel.postmortem.report.page import report_html
from sentinel.postmortem.report.plain import report_text
from sentinel.postmortem.report.record import report_json

INCIDENTS_SHOWN = 8

NEAR_SECONDS = 3600.0  # how far from an incident's detection its rounds are looked for in the log

Events = Callable[[str, float, float], Iterable[Event]]
"""The event log of a run, by its id, between two times (unix seconds)."""


class ReportFormat(StrEnum):
    """What ``report`` can write."""

    HTML = "html"
    TEXT = "text"
    JSON = "json"


def facts_of_incidents(incidents: Sequence[Incident], run_dir: Path | None, events: Events) -> list[Facts]:
    """The facts of each incident, oldest first, at most ``INCIDENTS_SHOWN``."""
    return [
        gather(one, run_dir / one.bundle if run_dir and one.bundle else None, run_dir, _near(one, events))
        for one in incidents[:INCIDENTS_SHOWN]
    ]


def _near(incident: Incident, events: Events) -> Iterable[Event]:
    opened, updated = incident.opened_at.timestamp(), incident.updated_at.timestamp()
    return events(incident.run_id, opened - NEAR_SECONDS, updated + NEAR_SECONDS)


def render(facts: Sequence[Facts], form: ReportFormat, title: str) -> str:
    """The report in one of its formats."""
    if form is ReportFormat.HTML:
        return report_html(facts, title)
    return report_text(facts) if form is ReportFormat.TEXT else report_json(facts)


def write_page(path: Path, content: str) -> None:
    """Write a report whole or not at all, readable by this user only: it holds training data. Raises OSError."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as out:
        out.write(content)
    tmp.replace(path)
