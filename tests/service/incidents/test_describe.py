"""Evidence in words and rows."""

from __future__ import annotations

import pytest
from service.incidents.rounds import NAN, Round

from sentinel.incidents.describe import MAX_FINDINGS, MAX_PARAMETERS, findings, parameters_of, plural, rank_list
from sentinel.wire.messages import Phase


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), "no rank"),
        ((1,), "rank 1"),
        ((0, 1), "ranks 0 and 1"),
        ((0, 2, 5), "ranks 0, 2 and 5"),
        (tuple(range(8)), "ranks 0, 1, 2, 3, 4, 5, 6 and 7"),
        (tuple(range(16384)), "ranks 0, 1, 2 … (16384 ranks)"),
    ],
)
def test_rank_lists_stay_short(ranks: tuple[int, ...], text: str) -> None:
    """A few ranks are named, many are counted."""
    assert rank_list(ranks) == text


def test_plurals() -> None:
    """One is singular."""
    assert [plural(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


def test_parameters_keep_their_order_and_come_once() -> None:
    """Names in the order met, over all evidence."""
    told = Round(2).raw(0, parameters=("b", "a")).raw(1, parameters=("a", "c"))
    assert parameters_of(told.evidence()) == ("b", "a", "c")


def test_parameters_are_bounded() -> None:
    """However many ranks name however many."""
    told = Round(2).raw(0, parameters=[f"a{i}" for i in range(30)]).raw(1, parameters=[f"b{i}" for i in range(30)])
    names = parameters_of(told.evidence())
    assert len(names) == MAX_PARAMETERS
    assert names[0] == "a0"


def test_findings_are_bounded_and_keep_the_suspects() -> None:
    """With more evidence than rows, the suspects' own is what stays."""
    told = Round(100).nan_gradient(77)
    rows = findings(told.window(), (77,))
    assert len(rows) == MAX_FINDINGS
    assert [row.rank for row in rows[:3]] == [77, 77, 0]
    assert [row.phase for row in rows[:2]] == ["wire", "reduced"]


def test_a_finding_keeps_what_the_rank_saw() -> None:
    """Counts, magnitudes, the collective, the parameters and the note are all there."""
    told = Round(2).wire(1, found=NAN, parameters=("w", "b"))
    (row,) = findings(told.window(), ())
    assert (row.nan, row.inf, row.numel, row.absmax, row.wire_absmax) == (3, 0, 100, 1.0, 1.0)
    assert (row.op, row.group, row.index, row.dtype) == ("allreduce_", "0", 0, "float32")
    assert (row.parameters, row.parameters_total) == (("w", "b"), 2)


def test_a_finding_without_a_collective_leaves_its_fields_empty() -> None:
    """A loss has a value and no collective."""
    (row,) = findings(Round(1).saw(Phase.LOSS, 0, value=float("inf"), note="n").window(), ())
    assert (row.op, row.group, row.index, row.dtype, row.wire_absmax) == (None,) * 5
    assert (row.loss, row.note) == (float("inf"), "n")
