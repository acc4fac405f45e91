"""Which curves a report draws around a fault, and of which ranks.

Owns the choice. Geometry is ``svg.py``'s.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup

from sentinel.postmortem.layers import LayerStory
from sentinel.postmortem.report.rounds import AFTER, BEFORE, History, RankRound
from sentinel.postmortem.report.svg import Line, line_chart

LINES_PER_RANK = 8  # ranks up to which each has its line; beyond, the suspects and the others' median
SUSPECTS_DRAWN = 4
LAYERS_DRAWN = 5

Value = Callable[[RankRound], float | None]


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart with its title, and what its lines are."""

    title: str
    drawing: Markup
    legend: tuple[tuple[str, str], ...]


def curves(history: History) -> tuple[Curve, ...]:
    """Loss, gradient norm and loss scale, as far as they were reported."""
    wanted: tuple[tuple[str, Value, bool], ...] = (
        ("loss", lambda c: c.loss, True),
        ("largest gradient contributed", lambda c: c.absmax, True),
        ("norm of the reduced gradients", lambda c: c.norm, False),
        ("loss scale", lambda c: c.loss_scale, False),
    )
    return tuple(curve for one in wanted if (curve := _curve(history, *one)) is not None)


def layer_curve(story: LayerStory, origin: int) -> Curve | None:
    """Gradient norms of the layers that broke first or grew most, in the last rounds before ``origin`` and in it."""
    drawn = story.layers[:LAYERS_DRAWN]
    near = [tuple(p for p in layer.points if origin - BEFORE <= p[0] <= origin + AFTER) for layer in drawn]
    styles = ["fault", *(f"other o{i % 4}" for i in range(len(drawn) - 1))]
    lines = [Line(one.name, style, points) for one, style, points in zip(drawn, styles, near, strict=True)]
    title = f"gradient norms by layer, as rank {story.rank} saw them"
    drawing = line_chart(title, lines[::-1], origin)  # the first on top
    return Curve(title, drawing, tuple((line.label, line.style) for line in lines)) if drawing is not None else None


def _curve(history: History, title: str, value: Value, of_each_rank: bool) -> Curve | None:
    lines = _per_rank(history, value) if of_each_rank else [_shared(history, value)]
    drawing = line_chart(title, lines, history.origin)
    if drawing is None:
        return None
    legend = tuple((line.label, line.style) for line in lines) if of_each_rank else ()
    return Curve(title, drawing, legend)


def _per_rank(history: History, value: Value) -> list[Line]:
    """The suspects last, so that they lie on top."""
    suspects = [r for r in history.suspects if r in history.all_ranks][:SUSPECTS_DRAWN]
    others = [r for r in history.all_ranks if r not in history.suspects]
    if len(history.all_ranks) <= LINES_PER_RANK:
        lines = [Line(f"rank {r}", f"other o{i % 4}", _points(history, r, value)) for i, r in enumerate(others)]
    else:
        lines = [Line("median of the other ranks", "other o0", _median(history, others, value))] if others else []
    # Red tells suspects from the others; where there are no others, colours tell the ranks apart.
    styles = ["fault"] * len(suspects) if others else [f"other o{i % 4}" for i in range(len(suspects))]
    drawn = zip(suspects, styles, strict=True)
    return [*lines, *(Line(f"rank {r}", style, _points(history, r, value)) for r, style in drawn)]


def _shared(history: History, value: Value) -> Line:
    """What is the same on all ranks: of each round the first rank that reported it."""
    points = []
    for round_ in history.rounds:
        cells = (history.cells.get((rank, round_)) for rank in history.all_ranks)
        points.append((round_, next((v for c in cells if c is not None and (v := value(c)) is not None), None)))
    return Line("all ranks", "other o0", tuple(points))


def _points(history: History, rank: int, value: Value) -> tuple[tuple[int, float | None], ...]:
    cells = ((round_, history.cells.get((rank, round_))) for round_ in history.rounds)
    return tuple((round_, value(cell) if cell is not None else None) for round_, cell in cells)


def _median(history: History, ranks: list[int], value: Value) -> tuple[tuple[int, float | None], ...]:
    points: list[tuple[int, float | None]] = []
    for round_ in history.rounds:
        cells = (history.cells.get((rank, round_)) for rank in ranks)
        found = [v for c in cells if c is not None and (v := value(c)) is not None]
        finite = [v for v in found if math.isfinite(v)]
        points.append((round_, statistics.median(finite) if finite else (found[0] if found else None)))
    return tuple(points)
