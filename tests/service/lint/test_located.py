"""From an operation that replay located to the lint that explains it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sentinel.postmortem.lint.located import operator_name, rules_for

CORPUS = Path(__file__).parents[2] / "corpus"

BORN = {  # where replay finds the first nonfinite value
    "01_ignored_labels": ("aten.nll_loss_forward.default", 40),
    "03_constant_sample": ("aten.div.Tensor", 26),
    "04_empty_sequence_mask": ("aten._softmax.default", 29),
    "07_group_advantage": ("aten.std.correction", 25),
    "09_ffn_half": ("aten.addmm.default", 27),
    "11_double_min_mask": ("aten._softmax.default", 32),
    "15_half_sum_then_divide": ("c10d.allreduce_.default", 20),
    "17_low_rank_compression": ("aten.div.Tensor", 34),
    "33_pair_distance": ("aten.div.Tensor", 21),
    "35_entropy_bonus": ("aten.mul.Tensor", 30),
    "49_sharded_masked_mean": ("aten.div.Tensor", 34),
}


@pytest.mark.parametrize("script", BORN)
def test_located_operation_finds_its_rule(script: str) -> None:
    """The rule that the corpus names comes first for the operator and line where the value is born."""
    op, line = BORN[script]
    expected = json.loads((CORPUS / "expected.json").read_text())["scripts"][script]["expected"]["lint"]
    found = rules_for(op, f"{script}.py:{line}", CORPUS)
    assert [finding.rule for finding in found][:1] == expected


def test_other_operation_on_another_line_finds_nothing() -> None:
    """An operator that no finding of the file is about is not explained by one."""
    assert rules_for("aten.conv2d.default", f"{CORPUS}/03_constant_sample.py:32") == []


def test_code_itself_is_looked_at_where_there_is_no_file() -> None:
    """A line of code in place of a path is linted alone."""
    assert [f.rule for f in rules_for("aten.div.Tensor", "    return x / x.std(1, keepdim=True)")] == [
        "division_by_std"
    ]


@pytest.mark.parametrize("line", ["absent.py:3", "if x:", "", ")(", "/proc/self/mem.py:1"])
def test_what_cannot_be_read_finds_nothing(line: str) -> None:
    """A missing file, half a statement or nothing at all gives no findings and no error."""
    assert rules_for("aten.div.Tensor", line) == []


@pytest.mark.parametrize(
    ("op", "name"),
    [("aten.div.Tensor", "div"), ("aten::div", "div"), ("div", "div"), ("c10d.allreduce_.default", "allreduce_")],
)
def test_operator_names(op: str, name: str) -> None:
    """The namespace and the overload of an operator do not matter."""
    assert operator_name(op) == name
