"""Parameters by ranks: whose gradient of which parameter is nonfinite, and how large the others are.

Owns the table. The numbers are the parts' statistics; a rank whose part has none says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sentinel.bundle.manifest import PartHeader, TensorStatistics
from sentinel.postmortem.report.batch import magnitude_level
from sentinel.postmortem.text import number

ROWS_SHOWN = 60
RANKS_SHOWN = 24


@dataclass(frozen=True, slots=True)
class Cell:
    """One rank's tensor: ``level`` 0 to 4 by magnitude, or ``nonfinite``; ``text`` is what stands there."""

    style: str
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of cells; the rows that hold something nonfinite come first if not all fit."""

    what: str
    ranks: tuple[int, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    rows_total: int
    nonfinite: int


def matrices(headers: Sequence[PartHeader]) -> tuple[Matrix, ...]:
    """Gradients, then parameters, each if any part has statistics of them."""
    gradients = _matrix("gradients", {h.rank: h.gradient_statistics for h in headers})
    parameters = _matrix("parameters and buffers", {h.rank: h.parameter_statistics for h in headers})
    return tuple(one for one in (gradients, parameters) if one is not None)


def _matrix(what: str, of: dict[int, tuple[TensorStatistics, ...]]) -> Matrix | None:
    ranks = tuple(sorted(of, key=lambda rank: (not of[rank], rank))[:RANKS_SHOWN])
    if not any(of.values()):
        return None
    ranks = tuple(sorted(ranks))
    found = {(s.name, rank): s for rank in ranks for s in of[rank]}
    names = list(dict.fromkeys(name for name, _ in found))
    bad = {name for (name, _), s in found.items() if s.nan or s.inf}
    shown = names if len(names) <= ROWS_SHOWN else sorted(names, key=lambda n: n not in bad)[:ROWS_SHOWN]
    sizes = [_size(s) for s in found.values() if _size(s)]
    low, high = (min(sizes), max(sizes)) if sizes else (0.0, 0.0)
    rows = tuple((name, tuple(_cell(found.get((name, rank)), low, high) for rank in ranks)) for name in shown)
    return Matrix(what, ranks, rows, len(names), len(bad))


def _size(s: TensorStatistics) -> float:
    return max(abs(s.minimum or 0.0), abs(s.maximum or 0.0))


def _cell(s: TensorStatistics | None, low: float, high: float) -> Cell:
    if s is None:
        return Cell("none", "", "not recorded: a part keeps what was not finite on its rank")
    shape = "x".join(str(n) for n in s.shape) or "scalar"
    if s.nan or s.inf:
        counts = " ".join(f"{n} {word}" for n, word in ((s.nan, "NaN"), (s.inf, "inf")) if n)
        return Cell("nonfinite", counts, f"{s.dtype} {shape}: {counts}")
    size = _size(s)
    return Cell(
        f"h{magnitude_level(size, low, high)}", number(size), f"{s.dtype} {shape}: largest magnitude {number(size)}"
    )
