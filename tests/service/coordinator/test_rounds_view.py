"""The rounds' JSON form: blocks of ranks, their worst state, and numbers that are not finite."""

from __future__ import annotations

import json
import math

import pytest

from sentinel.coordinator.progress import RankSaw, RoundRow
from sentinel.coordinator.rounds_view import MAX_BLOCKS, RoundsAnswer, rounds_answer


def row(saw: bytes, **fields: object) -> RoundRow:
    """A round in which the ranks saw this."""
    made = RoundRow(0, 3, 3, ranks=bytearray(saw))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def blocks(saw: bytes, world_size: int = 0, **asked: int) -> tuple[RoundsAnswer, str]:
    """The answer for one round, and its blocks."""
    wanted = {"blocks": 64, "first": 0, "count": 0, **asked}
    answer = rounds_answer("run", [row(saw)], world_size or len(saw), **wanted)
    return answer, answer.rounds[0].blocks


def test_few_ranks_are_a_block_each() -> None:
    """Each rank has a digit of its own; one that never reported is 0, also beyond those heard of."""
    answer, shown = blocks(bytes([1, 4, 2, 3]), world_size=6)
    assert (shown, answer.ranks_per_block, answer.ranks) == ("142300", 1, 6)


def test_many_ranks_are_summed_up_by_the_worst() -> None:
    """One rank of 16,384 that saw nonfinite values of its own marks its block, and only that one."""
    saw = bytearray(b"\x01" * 16_384)
    saw[9000] = RankSaw.OWN
    answer, shown = blocks(bytes(saw))
    assert (len(shown), answer.ranks_per_block) == (64, 256)
    assert [index for index, digit in enumerate(shown) if digit == "4"] == [9000 // 256]


@pytest.mark.parametrize(
    ("first", "count", "expected"), [(2, 2, "23"), (3, 100, "34"), (99, 5, "4"), (0, 1, "0"), (4, 0, "4")]
)
def test_a_part_of_the_ranks_can_be_asked_for(first: int, count: int, expected: str) -> None:
    """Whatever is asked for, the answer lies within the ranks there are."""
    assert blocks(bytes([0, 1, 2, 3, 4]), first=first, count=count)[1] == expected


@pytest.mark.parametrize("number", [0, 1, 7, MAX_BLOCKS, 10**9])
def test_the_number_of_blocks_is_bounded(number: int) -> None:
    """No question makes more blocks than the bound, and every rank is in one."""
    answer, shown = blocks(bytes(1000), blocks=number)
    assert len(shown) <= MAX_BLOCKS
    assert len(shown) * answer.ranks_per_block >= 1000


def test_a_run_without_a_rank_is_an_answer() -> None:
    """Before the first report there are no rounds; with rounds and no world there are no blocks."""
    assert rounds_answer("run", [], 0, blocks=64, first=0, count=0).rounds == ()
    assert blocks(b"")[1] == ""


def test_what_is_not_finite_is_a_string() -> None:
    """JSON has no NaN: it comes as text, so that a reader sees it instead of an absent value."""
    answer = rounds_answer(
        "run", [row(b"\x04", loss_nonfinite=1, gradient_norm=math.inf)], 1, blocks=1, first=0, count=0
    )
    [shown] = json.loads(answer.model_dump_json())["rounds"]
    assert (shown["loss_mean"], shown["gradient_norm"], shown["loss_min"]) == ("NaN", "Infinity", None)
    assert RoundsAnswer.model_validate_json(answer.model_dump_json()).rounds[0].gradient_norm == math.inf
