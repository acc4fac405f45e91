"""A dozen faults of the random matrix in one launch: each verdict is the one that can be known, and healthy rounds stay silent."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

BENCHMARKS = Path(__file__).parents[2] / "scripts" / "benchmarks"
MODULES = ("matrix", "matrix_cases")

# Way of reducing, dtype, phase, what goes wrong, on which ranks, in which collective of the round.
FAULTS = [
    ("ddp", "float32", "raw", "nan", (1,), 0),
    ("ddp", "bfloat16", "reduced", "inf", (0,), 0),
    ("ddp", "float32", "reduced", "bit flip", (1,), 0),
    ("ddp", "float32", "raw", "sign", (0,), 0),
    ("ddp fp16 hook", "float32", "raw", "cast overflow", (0,), 0),
    ("ddp user hook", "float16", "raw", "sum overflow", (0, 1), 0),
    ("fsdp2", "bfloat16", "wire", "nan", (1,), 1),
    ("fsdp2", "float32", "reduced", "nan", (0,), 0),
    ("loop", "float32", "wire", "inf", (1,), 2),
    ("flat buffer", "float32", "wire", "lost", (1,), 0),
    ("flat buffer", "float16", "wire", "duplicated", (0,), 0),
    ("coalesced", "float16", "raw", "nan", (0, 1), 0),
]


@pytest.fixture(scope="module")
def modules() -> Iterator[list[Any]]:
    """The benchmark and its table of cases; it imports its neighbours by name, as it does when it is run."""
    sys.path.insert(0, str(BENCHMARKS))
    yield [importlib.import_module(name) for name in MODULES]
    sys.path.remove(str(BENCHMARKS))
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def table(modules: list[Any]) -> Any:
    """What may happen where, and what can be known of it."""
    return modules[1]


@pytest.fixture(scope="module")
def results(modules: list[Any], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], Any]:
    """What came of each fault, all of them in one launch of two ranks."""
    matrix, table = modules
    cases = [
        table.Case(number, 2, table.Way(way), dtype, phase, table.Does(does), ranks, collective)
        for number, (way, dtype, phase, does, ranks, collective) in enumerate(FAULTS)
    ]
    return dict(zip(FAULTS, matrix.run_world(cases, 2, tmp_path_factory.mktemp("matrix")), strict=True))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault[:4])).replace(" ", "_"))
def test_the_verdict_is_what_can_be_known(
    results: dict[tuple[Any, ...], Any], table: Any, fault: tuple[Any, ...]
) -> None:
    """Kind, stage and ranks of the fault, or nothing where nobody could tell it from another batch; no alarm before it."""
    one = results[fault]
    assert one.happened
    assert one.alarms == ()
    assert one.found == (() if table.right(one.case) == table.NOTHING else (table.right(one.case),))


@pytest.mark.parametrize("seed", range(3))
def test_a_draw_is_possible_and_repeatable(table: Any, seed: int) -> None:
    """The same seed draws the same faults, all of them possible, over every way of reducing and every phase."""
    cases = table.draw(seed, 210, (2, 3, 4))
    assert cases == table.draw(seed, 210, (2, 3, 4))
    assert [case for case in cases if not table.possible(case)] == [], f"seed {seed}"
    assert {(case.way, case.phase) for case in cases} == {(way, phase) for way in table.Way for phase in table.PHASES}
    assert {case.does for case in cases} == set(table.Does)


def test_only_keeps_what_was_asked_for(table: Any) -> None:
    """``--only`` draws cases whose text has these words, and says so where there is none."""
    assert {(c.way, c.dtype) for c in table.draw(0, 20, (2,), "loop float16")} == {(table.Way.LOOP, "float16")}
    with pytest.raises(ValueError, match="no case"):
        table.draw(0, 20, (2,), "ring")
