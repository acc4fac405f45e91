"""Export formats and the table of incidents."""

from __future__ import annotations

import json

import story

from sentinel.incidents.model import Incident, IncidentList
from sentinel.postmortem.export import ExportFormat, export_incidents, incident_table


def listed(*incidents: Incident) -> IncidentList:
    """A list of the story's run."""
    return IncidentList(run_id=story.RUN, incidents=incidents)


def test_json_reads_back_whole() -> None:
    """The JSON export is the contract's list and loses nothing."""
    whole = listed(story.incident(), story.incident(id="b"))
    assert IncidentList.model_validate_json(export_incidents(whole, ExportFormat.JSON, None)) == whole


def test_jsonl_has_a_line_for_each() -> None:
    """The JSON lines export has one incident per line."""
    lines = export_incidents(listed(story.incident(), story.incident(id="b")), ExportFormat.JSONL, None).splitlines()
    assert [json.loads(line)["id"] for line in lines] == [story.incident().id, "b"]


def test_markdown_cannot_be_broken_out_of() -> None:
    """A reason with a code fence in it stays inside the fence of its own page."""
    text = export_incidents(listed(story.incident(reason="```\n# heading")), ExportFormat.MARKDOWN, None)
    assert text.count("```") == 2
    assert not [line for line in text.splitlines() if line.startswith("# ")]


def test_nothing_to_export_is_said_or_empty() -> None:
    """Without incidents markdown says so, JSON lines are empty, JSON is a list without any."""
    assert export_incidents(listed(), ExportFormat.MARKDOWN, None) == "No incidents."
    assert export_incidents(listed(), ExportFormat.JSONL, None) == ""
    assert json.loads(export_incidents(listed(), ExportFormat.JSON, None))["incidents"] == []


def test_table_cuts_many_ranks() -> None:
    """A table row shows eight ranks and a sign that there are more."""
    assert "0,1,2,3,4,5,6,7,…" in incident_table([story.incident(suspect_ranks=tuple(range(20)))])
    assert incident_table([story.incident(suspect_ranks=())]).splitlines()[1].split()[7] == "-"
