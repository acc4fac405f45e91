"""The page of one incident."""

from __future__ import annotations

from pathlib import Path

import pytest
import story

from sentinel.incidents.model import Attribution, Kind, Stage, utc
from sentinel.postmortem.incident_page import FINDINGS_SHOWN, SampleLine, describe_incident
from sentinel.wire.messages import Guarded


def test_evidence_table_has_a_row_for_each_finding() -> None:
    """Rank, phase, operation, dtype, counts, the largest value sent and the loss stand in the row of each finding."""
    finding = story.incident().findings[0].model_copy(update={"loss": float("nan"), "inf": 3, "absmax": 12.5})
    rows = describe_incident(story.incident(findings=(finding,))).splitlines()
    row = next(line.split() for line in rows if line.startswith("  1 "))
    assert row == ["1", "wire", "allreduce", "float32", "4657", "4657", "3", "12.5", "0", "nan"]


def test_many_findings_are_cut_and_counted() -> None:
    """A page shows the first findings and says how many more there are."""
    findings = story.incident().findings * FINDINGS_SHOWN
    assert f"… and {FINDINGS_SHOWN} more" in describe_incident(story.incident(findings=findings))


def test_missing_ranks_are_said() -> None:
    """If it was judged without some ranks, the page says without whom."""
    assert "ranks 2 and 3: judged without them" in describe_incident(story.incident(missing_ranks=(2, 3)))


def test_incident_without_bundle_says_so() -> None:
    """Without a bundle no command on one is offered."""
    page = describe_incident(story.incident(bundle=None), Path("runs/x"))
    assert "No bundle was kept." in page
    assert "dump show" not in page
    assert "sentinel incidents export a0-r000007-01 --run-dir runs/x" in page


def test_samples_are_listed() -> None:
    """Odd samples stand on the page with their rank."""
    page = describe_incident(story.incident(), samples=[SampleLine(1, "sample 5 is constant")])
    assert "  rank 1: sample 5 is constant" in page


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("stage", list(Stage))
def test_every_kind_has_a_page(kind: Kind, stage: Stage) -> None:
    """Every kind at every stage makes a page, also with nothing but its required fields."""
    bare = story.incident(
        kind=kind, stage=stage, attribution=Attribution.NONE, suspect_ranks=(), findings=(), parameters=()
    )
    assert str(kind) in describe_incident(bare)


def test_what_was_done_about_it_is_told() -> None:
    """The guard's decision, and who has seen the incident and said what; nothing of both where there was nothing."""
    plain = describe_incident(story.incident(), None)
    assert "guard" not in plain
    assert "seen by" not in plain
    acted = story.incident(
        guard=Guarded.SKIPPED, acknowledged_at=utc(0.0), acknowledged_by="ada", acknowledged_note="bad scan"
    )
    told = describe_incident(acted, None)
    assert "the step was left out on every rank" in told
    assert "ada at 1970-01-01 00:00:00 UTC: bad scan" in told
