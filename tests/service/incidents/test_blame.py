"""Origins and receivers: who made the first nonfinite value, and who only got it."""

from __future__ import annotations

import pytest
from service.incidents.rounds import ACTIVATION, BUCKET, DERIVED, FINITE, HALF_BUCKET, INF, SHARD, Round, collective

from sentinel.incidents.blame import (
    FINITE_MAX,
    first_reduced,
    raw_nonfinite_ranks,
    raw_origins,
    received_through_activation,
    same_collective,
    sum_may_overflow,
    wire_origins,
)
from sentinel.wire.messages import Phase, Role


def test_a_receiver_of_an_activation_is_no_origin() -> None:
    """Rank 1 gave NaN activations, rank 0 got them: both have NaN gradients, one is the origin."""
    window = Round(2).wire(1, of=ACTIVATION, raw=None).reduced(of=ACTIVATION).raw(0, 1).window()
    assert received_through_activation(window, 0)
    assert not received_through_activation(window, 1)
    assert raw_origins(window) == (1,)
    assert raw_nonfinite_ranks(window) == (0, 1)


@pytest.mark.parametrize("own", [Phase.LOSS, Phase.RAW, Phase.INIT, Phase.PARAMS, Phase.BUFFERS])
def test_own_evidence_before_an_activation_makes_an_origin(own: Phase) -> None:
    """A rank that had a nonfinite value of its own first did not receive it."""
    window = Round(2).saw(own, 0).reduced(0, of=ACTIVATION).raw(0).window()
    assert raw_origins(window) == (0,)


@pytest.mark.parametrize("neutral", [Phase.OUTPUT, Phase.EXIT])
def test_an_output_says_nothing_about_where_the_value_came_from(neutral: Phase) -> None:
    """A rank that saw its output and then the reduction's result nonfinite may still be a receiver."""
    assert received_through_activation(Round(2).saw(neutral, 0).reduced(0, of=ACTIVATION).window(), 0)


def test_a_gradient_result_does_not_excuse() -> None:
    """Only activations carry NaN into a rank's own gradients; a gradient's reduction comes after them."""
    assert raw_origins(Round(2).reduced(0, of=BUCKET).raw(0).window()) == (0,)


def test_a_rank_with_no_evidence_received_nothing() -> None:
    """A rank that saw nothing is neither."""
    assert not received_through_activation(Round(2).raw(0).window(), 1)


def test_wire_origins_are_ranks_with_finite_gradients_behind_a_nonfinite_wire() -> None:
    """The cast's victim is named; the rank whose gradients were nonfinite already is not."""
    told = Round(3).wire(0, of=HALF_BUCKET, found=INF, raw=FINITE).wire(1, of=HALF_BUCKET)
    assert [e.rank for e in wire_origins(told.window())] == [0]


def test_wire_origins_come_once_and_in_rank_order() -> None:
    """The first evidence of each rank counts."""
    later = collective(HALF_BUCKET, index=1)
    told = Round(3).wire(2, 0, of=HALF_BUCKET, found=INF, raw=FINITE).wire(0, 2, of=later, found=INF, raw=FINITE)
    assert [(e.rank, e.order) for e in wire_origins(told.window())] == [(0, 0), (2, 0)]


def test_a_rank_that_received_first_is_no_wire_origin() -> None:
    """What came out of the first collective goes into the second: that rank passes it on."""
    told = Round(2).reduced(1, of=BUCKET).wire(0, 1, of=DERIVED, raw=FINITE)
    assert [e.rank for e in wire_origins(told.window())] == [0]


def test_the_first_reduced_is_the_smallest_index_then_the_lowest_rank() -> None:
    """The earliest collective of the round counts, whatever rank and order it was seen in."""
    told = Round(3).reduced(0, of=collective(index=5)).reduced(2, 1, of=collective(index=2))
    first = first_reduced(told.window())
    assert first is not None
    assert first.collective is not None
    assert (first.rank, first.collective.index) == (1, 2)


def test_the_first_reduced_of_a_role() -> None:
    """Activations are asked for by role and are no gradient's result."""
    window = Round(2).reduced(0, of=ACTIVATION).window()
    assert first_reduced(window) is None
    found = first_reduced(window, Role.ACTIVATION)
    assert found is not None
    assert found.rank == 0


def test_results_of_one_collective_are_paired_by_group_and_index() -> None:
    """Another bucket's and another group's results do not belong to it."""
    told = Round(3).reduced(0, 1).reduced(2, of=collective(index=1)).reduced(2, of=collective(group="other"))
    assert [e.rank for e in same_collective(told.window(), told.evidence(0)[0])] == [0, 1]


def test_evidence_without_a_collective_has_no_siblings() -> None:
    """A gradient seen outside of any collective pairs with nothing."""
    told = Round(2).raw(0).reduced(1)
    assert same_collective(told.window(), told.evidence(0)[0]) == []


@pytest.mark.parametrize(
    ("dtype", "absmax", "size", "overflows"),
    [
        ("float16", 32_752.0, 2, False),  # 65504 exactly: still finite
        ("float16", 32_753.0, 2, True),
        ("bfloat16", 32_753.0, 2, False),
        ("float32", 3e38, 2, True),
        ("float64", 3e38, 2, False),
        ("float8_e4m3fn", 1e9, 2, False),  # a dtype whose range is not known accuses nobody of overflow
    ],
)
def test_a_sum_overflows_beyond_the_largest_finite_value(dtype: str, absmax: float, size: int, overflows: bool) -> None:
    """The bound is the sum of the inputs' magnitudes against the dtype's own maximum."""
    told = Round(size).reduced(of=collective(dtype=dtype), absmax=absmax)
    assert sum_may_overflow(told.evidence(), size, dtype) == (overflows, size * absmax)


def test_unreported_inputs_count_as_the_largest_reported() -> None:
    """Reduce-scatter: the owner alone reports, the other ranks are taken to have given as much."""
    told = Round(8).reduced(3, of=SHARD, absmax=9_000.0)
    assert sum_may_overflow(told.evidence(), 8, "float16") == (True, 72_000.0)


def test_no_results_bound_nothing() -> None:
    """With nothing reported there is no overflow to speak of."""
    assert sum_may_overflow([], 4, "float16") == (False, 0.0)


def test_largest_finite_values_are_those_of_the_formats() -> None:
    """IEEE 754 (and bfloat16) by formula: (2 - 2**-fraction) * 2**bias."""
    formats = {"float16": (10, 15), "bfloat16": (7, 127), "float32": (23, 127), "float64": (52, 1023)}
    assert {name: (2 - 2.0**-bits) * 2.0**bias for name, (bits, bias) in formats.items()} == FINITE_MAX
