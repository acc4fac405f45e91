"""The corpus of faulty and clean training scripts: a known fault is found by the rule that is named for it, and by no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sentinel.postmortem.lint.check import lint_text

CORPUS = Path(__file__).parents[2] / "corpus"
EXPECTED = json.loads((CORPUS / "expected.json").read_text())["scripts"]


@pytest.mark.parametrize("script", sorted(EXPECTED))
def test_corpus_script_is_found_by_its_rule_alone(script: str) -> None:
    """A script's findings are of exactly the rules that expected.json lists; for the clean ones there are none."""
    found = lint_text((CORPUS / f"{script}.py").read_text(), f"{script}.py")
    assert sorted({finding.rule for finding in found}) == sorted(EXPECTED[script]["expected"]["lint"])
