"""The corpus: known failures and known healthy scripts, each run for real, each with the verdict that is expected of it."""

from __future__ import annotations

import ast

import pytest
from loading import load_script
from training_run import CORPUS, Case, Ran

pytestmark = pytest.mark.e2e
accuracy = load_script("benchmarks/accuracy")
EXPECTED = accuracy.read_expected(CORPUS)
FAULTY = {name: one for name, one in EXPECTED.items() if not one.clean}
CLEAN = {name: one for name, one in EXPECTED.items() if one.clean}


def case(name: str) -> Case:
    """A script of the corpus."""
    return Case(str(CORPUS / f"{name}.py"))


@pytest.mark.parametrize(("case", "expected"), [pytest.param(case(n), e, id=n) for n, e in FAULTY.items()])
def test_the_first_incident_is_the_fault(ran: Ran, expected: object) -> None:
    """The first incident of a faulty script has the expected kind, stage, suspect ranks and step."""
    score = accuracy.judge(expected, ran.incidents)
    assert score.passed, f"{expected}\n{score}\n{ran.said}"
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
