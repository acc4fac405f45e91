"""Plain text: harmless names, aligned columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.postmortem.text import columns, labelled, names_text, number, printable


@given(st.text(max_size=300))
def test_printable_never_drives_a_terminal(text: str) -> None:
    """Whatever a process names itself, the shown form is one printable line that can be encoded, within the limit."""
    shown = printable(text, 50)
    assert shown.isprintable()
    assert len(shown) <= 50
    shown.encode("utf-8")


@pytest.mark.parametrize("name", ["encoder.layer.0.weight", "größe", "日本"])
def test_printable_keeps_ordinary_names(name: str) -> None:
    """Names of ordinary letters, in any script, are shown as they are."""
    assert printable(name) == name


def test_columns_line_up() -> None:
    """Each column is as wide as its widest cell, and no line ends in spaces."""
    shown = columns(("A", "LONGER"), [("1", "x"), ("22222", "y")], indent="  ")
    assert shown.splitlines() == ["  A      LONGER", "  1      x", "  22222  y"]


def test_labels_line_up() -> None:
    """Values start in one column."""
    assert labelled([("a", "1"), ("long", "2")]) == "a     1\nlong  2"


@pytest.mark.parametrize(
    ("names", "total", "expected"),
    [(("a",), 1, "a"), (("a", "b"), 10, "a, b and 8 more"), (tuple("abcdef"), 0, "a, b, c, d and 2 more")],
)
def test_names_are_cut_and_counted(names: tuple[str, ...], total: int, expected: str) -> None:
    """The first names are shown, and how many there are in all, also when the sender sent fewer than there are."""
    assert names_text(names, total) == expected


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (float("nan"), "nan"), (float("-inf"), "-inf"), (0.123456, "0.1235")]
)
def test_numbers_are_short_and_honest(value: float | None, shown: str) -> None:
    """NaN and infinities are spelt out, absent numbers are a dash."""
    assert number(value) == shown
