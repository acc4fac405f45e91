"""The page of one incident."""

from __future__ import annotations

from pathlib import Path

import pytest
import story

from sentinel.incidents.model import Attribution, Kind, Stage
from sentinel.postmortem.incident_page import FINDINGS_SHOWN, SampleLine, describe_incident


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
