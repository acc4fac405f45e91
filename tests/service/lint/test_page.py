"""deploy/LINT.md, held true: a section for every rule, and examples that behave as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sentinel.postmortem.lint.check import lint_text
from sentinel.postmortem.lint.finding import PAGE
from sentinel.postmortem.lint.registry import RULES

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
SECTIONS = dict(zip(*[iter(re.split(r"^### (\w+)\n", TEXT, flags=re.MULTILINE)[1:])] * 2, strict=True))
PRELUDE = """\
import contextlib
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

"""


def examples(rule: str) -> tuple[str, str]:
    """The code that the rule finds, and the repaired code."""
    found, clean = re.findall(r"```python\n(.*?)```", SECTIONS[rule], flags=re.DOTALL)
    return found, clean


def flowing(text: str) -> str:
    """Text without its line breaks."""
    return " ".join(text.split())


def test_page_has_exactly_the_rules() -> None:
    """Each rule has one section, in the registry's order, and no section is of an unknown rule."""
    assert list(SECTIONS) == list(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_section_says_what_the_rule_says(rule: str) -> None:
    """A section explains in the rule's own words why it goes wrong and how it is repaired."""
    section = flowing(SECTIONS[rule])
    assert RULES[rule].why in section
    assert RULES[rule].fix[1:] in section


@pytest.mark.parametrize("rule", RULES)
def test_failing_example_is_found_by_this_rule_alone(rule: str) -> None:
    """The first example of a section is reported by its rule and by no other."""
    found = lint_text(PRELUDE + examples(rule)[0], "example.py")
    assert {finding.rule for finding in found} == {rule}


@pytest.mark.parametrize("rule", RULES)
def test_clean_example_is_found_by_no_rule(rule: str) -> None:
    """The repaired example of a section is reported by no rule."""
    assert lint_text(PRELUDE + examples(rule)[1], "example.py") == []


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_explains_itself_in_numbers_or_names(rule: str) -> None:
    """A rule's texts are one to three sentences, without a line break, and its fix names code or a call."""
    assert "\n" not in RULES[rule].why + RULES[rule].fix
    assert 40 < len(RULES[rule].why) < 400
    assert 20 < len(RULES[rule].fix) < 200
