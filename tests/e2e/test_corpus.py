"""The corpus: known failures and known healthy scripts, each run for real, each with the verdict that is expected of it."""

from __future__ import annotations

import ast

import pytest
from loading import load_script
from training_run import CORPUS, Case, Ran

pytestmark = pytest.mark.e2e
WARM = True
accuracy = load_script("benchmarks/accuracy")
EXPECTED = accuracy.read_expected(CORPUS)
FAULTY = {name: one for name, one in EXPECTED.items() if not one.clean}
CLEAN = {name: one for name, one in EXPECTED.items() if one.clean}


COLLAPSE = [
    "nonfinite_gradient",
    "scaler_collapse",
]  # NaN that no scale heals is told at once, what it does to the scale later


def case(name: str) -> Case:
    """A script of the corpus."""
    return Case(str(CORPUS / f"{name}.py"))


@pytest.mark.parametrize(("case", "expected"), [pytest.param(case(n), e, id=n) for n, e in FAULTY.items()])
def test_the_first_incident_is_the_fault(ran: Ran, expected: object) -> None:
    """The first incident of a faulty script has the expected kind, stage, suspect ranks and step, and no other follows."""
    score = accuracy.judge(expected, ran.incidents)
    assert score.passed, f"{expected}\n{score}\n{ran.said}"
    kinds = [one["kind"] for one in ran.incidents]
    assert len(kinds) == 1 or kinds == COLLAPSE, f"one failure is one incident\n{ran.said}"
    assert not ran.faults


@pytest.mark.parametrize("case", [pytest.param(case(n), id=n) for n in CLEAN])
def test_a_healthy_script_raises_no_alarm(ran: Ran) -> None:
    """A clean script has no incident at all, and its rounds were seen."""
    assert ran.exit_code == 0, ran.said
    assert ran.incidents == []
    assert ran.counts["rounds_checked"] >= 4
    assert not ran.faults


def test_every_script_has_its_expectation() -> None:
    """No script of the corpus is without a line in expected.json, and none names Sentinel."""
    scripts = {path.stem: path.read_text() for path in CORPUS.glob("*.py")}
    assert scripts.keys() == EXPECTED.keys()
    for text in scripts.values():
        names = {a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names}
        assert not {name for name in names if "sentinel" in name}


FOUND = {
    "kind": "nonfinite_gradient",
    "stage": "pre_reduce",
    "suspect_ranks": [1],
    "step": 3,
    "cause": "data",
    "round": 3,
    "opened_at": "2026-11-30T12:00:00Z",
}
WANTED = accuracy.Expected(("nonfinite_gradient",), "pre_reduce", (1,), 3, "hardware")


@pytest.mark.parametrize(
    ("wrong", "value"),
    [("kind", "nonfinite_loss"), ("stage", "forward"), ("suspect_ranks", [0]), ("suspect_ranks", [0, 1]), ("step", 2)],
)
def test_each_part_of_a_verdict_is_judged(wrong: str, value: object) -> None:
    """A verdict passes if all but its cause is right, and fails if any other part is wrong or another incident came first."""
    assert accuracy.judge(WANTED, [FOUND]).passed
    assert not accuracy.judge(WANTED, [{**FOUND, wrong: value}]).passed
    assert not accuracy.judge(WANTED, [FOUND, {**FOUND, wrong: value, "round": 2}]).passed


@pytest.mark.parametrize("incidents", [[], None])
def test_nothing_found_is_wrong_for_a_fault(incidents: list[object] | None) -> None:
    """A fault without an incident is a miss, and so is a run whose incidents cannot be read."""
    assert not accuracy.judge(WANTED, incidents).passed


def test_anything_found_is_wrong_for_a_clean_script() -> None:
    """For a clean script only an empty list passes."""
    clean = accuracy.Expected((), "none", (), None, "none")
    assert accuracy.judge(clean, []).passed
    assert not accuracy.judge(clean, [FOUND]).passed
    assert not accuracy.judge(clean, None).passed
