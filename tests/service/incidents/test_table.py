"""The published table of rules says what the rules do."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from service.incidents.stories import DECIDES

from sentinel.incidents import classify, habits, replicas, silence, stalls, state
from sentinel.incidents.classify import Quiet
from sentinel.incidents.table import TABLE

MAKERS = {"verdict_on", "finding", "_finding", "_bad_reduction"}
ROWS = {row.rule: row for row in TABLE}


def _strings(node: ast.expr) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _named_in(module: object) -> set[str]:
    """Rule names that a module's calls pass on, or that it keys its reasons by."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):  # type: ignore[arg-type]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in MAKERS and len(node.args) > 1:
            found |= _strings(node.args[1])
        if isinstance(node, ast.Call):
            found |= {s for k in node.keywords if k.arg == "rule" for s in _strings(k.value)}
    return found


def test_every_rule_has_a_row_and_every_row_a_rule() -> None:
    """No verdict without a line in the table, and no line that nothing decides."""
    named = set().union(*(_named_in(module) for module in (classify, state, replicas, stalls, habits, silence)))
    quiet = {Quiet.SCALER_SEARCH.value, Quiet.SCALER_COLLAPSED.value}
    assert named | set(habits.REASONS) | quiet == set(ROWS)


@pytest.mark.parametrize("rule", sorted(DECIDES))
def test_a_row_says_what_its_rule_says(rule: str) -> None:
    """Kind, stage and severity of the table are those that the stories' verdicts have."""
    row = ROWS[rule]
    assert (row.kind, row.stage, row.severity) == DECIDES[rule]


@pytest.mark.parametrize("rule", sorted(ROWS))
def test_every_row_has_a_story(rule: str) -> None:
    """Each rule is named by at least one other test of this folder; those of wrong use are told one by one from their reasons."""
    others = [p for p in Path(__file__).parent.glob("*.py") if p.name != Path(__file__).name]
    quiet = {"scaler_search": "SCALER_SEARCH", "scaler_collapsed": "SCALER_COLLAPSED"}
    assert rule in habits.REASONS or any(quiet.get(rule, rule) in p.read_text() for p in others)
