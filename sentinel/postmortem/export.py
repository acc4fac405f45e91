"""Incidents as text for elsewhere: a table for the terminal, JSON for archives, JSON lines for pipelines, Markdown for tickets.

Owns the formats. The JSON forms are the contract of ``incidents/model.py``, unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from sentinel.incidents.model import Incident, IncidentList
from sentinel.postmortem.incident_page import describe_incident
from sentinel.postmortem.samples import odd_samples
from sentinel.postmortem.text import columns
from sentinel.postmortem.wording import verdict_sentence


class ExportFormat(StrEnum):
    """What ``incidents export`` can write."""

    JSON = "json"
    JSONL = "jsonl"
    MARKDOWN = "markdown"


def export_incidents(listed: IncidentList, form: ExportFormat, run_dir: Path | None) -> str:
    """All of ``listed`` in one text, without a newline at the end."""
    if form is ExportFormat.JSON:
        return listed.model_dump_json(indent=1)
    if form is ExportFormat.JSONL:
        return "\n".join(incident.model_dump_json() for incident in listed.incidents)
    return "\n\n".join(_markdown(incident, run_dir) for incident in listed.incidents) or "No incidents."


def incident_table(incidents: Sequence[Incident]) -> str:
    """One line per incident."""
    header = ("ID", "STATE", "SEVERITY", "KIND", "STEP", "STAGE", "ATTRIBUTION", "RANKS", "SEEN")
    return columns(header, (_row(incident) for incident in incidents))


def _row(incident: Incident) -> tuple[str, ...]:
    ranks = ",".join(str(rank) for rank in incident.suspect_ranks[:8]) or "-"
    return (
        incident.id,
        incident.state,
        incident.severity,
        incident.kind,
        str(incident.step),
        incident.stage,
        incident.attribution,
        ranks if len(incident.suspect_ranks) <= 8 else f"{ranks},…",
        str(incident.occurrences),
    )


def _markdown(incident: Incident, run_dir: Path | None) -> str:
    page = describe_incident(incident, run_dir, odd_samples(incident, run_dir)).replace("```", "'''")
    return f"## {incident.kind}: {verdict_sentence(incident)}\n\n```text\n{page}\n```"
