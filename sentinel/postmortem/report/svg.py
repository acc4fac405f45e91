"""Small charts as inline SVG: lines over rounds, ranks by rounds, a histogram.

Owns geometry. Colours are classes of the page's style sheet, so that dark mode and print need no second drawing; there are no
scripts and no style attributes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from sentinel.postmortem.report.rounds import CellState, History, RankRound
from sentinel.postmortem.text import number

_WIDTH, _HEIGHT = 420, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 24
_CELL, _GAP = 16, 2


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: points are (round, value); a value that is not finite is drawn as a mark at the top."""

    label: str
    style: str
    points: tuple[tuple[int, float | None], ...]


def line_chart(title: str, lines: Sequence[Line], origin: int) -> Markup | None:
    """The lines over rounds, the fault's round marked; logarithmic if values span more than two decades. None without values."""
    values = [v for line in lines for _, v in line.points if v is not None and math.isfinite(v)]
    rounds = [r for line in lines for r, v in line.points if v is not None]
    if not values or not rounds:
        return None
    frame = _Frame(min(*rounds, origin), max(*rounds, origin), min(values), max(values))
    parts = [_axes(frame, origin)]
    for line in lines:
        parts += [
            _path(frame, line),
            *(_mark(frame, line, r) for r, v in line.points if v is not None and not math.isfinite(v)),
        ]
    body = Markup("").join(parts)
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _WIDTH, _HEIGHT, title, body
    )


class _Frame:
    """From rounds and values to places on the drawing."""

    def __init__(self, first: int, last: int, low: float, high: float) -> None:
        self.first, self.last = first, max(last, first + 1)
        self.log = low > 0 and high / low > 100
        self.low, self.high = (math.log10(low), math.log10(high)) if self.log else (low, high)
        if self.high / 2 - self.low / 2 < 1e-12 * max(abs(self.high), 1e-300):
            margin = abs(self.high) * 0.1 or 1.0
            self.low, self.high = self.low - margin, self.high + margin

    def x(self, round_: int) -> float:
        return _LEFT + (round_ - self.first) / (self.last - self.first) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        place = math.log10(value) if self.log else value
        share = (place / 2 - self.low / 2) / (self.high / 2 - self.low / 2)  # halves: the span of extremes overflows
        return _TOP + 8 + (1 - min(max(share, 0.0), 1.0)) * (_HEIGHT - _TOP - _BOTTOM - 8)

    def ticks(self) -> list[float]:
        middle = self.low / 2 + self.high / 2
        return [float(f"{10**v:.6g}") if self.log else v for v in (self.low, middle, self.high)]


def _axes(frame: _Frame, origin: int) -> Markup:
    parts = [
        Markup(
            '<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/><text class="tick" x="{}" y="{:.1f}">{}</text>'
        ).format(_LEFT, _WIDTH - _RIGHT, frame.y(v), frame.y(v), _LEFT - 6, frame.y(v) + 3.5, short(v))
        for v in frame.ticks()
    ]
    at = frame.x(origin)
    parts.append(
        Markup('<line class="origin" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>').format(
            at, _TOP - 6, _HEIGHT - _BOTTOM
        )
    )
    labels = {frame.first: "start", origin: "middle", frame.last: "end"}
    if (at - _LEFT) < 40:
        labels.pop(frame.first if frame.first != origin else -1, None)
    if (_WIDTH - _RIGHT - at) < 40 and frame.last != origin:
        labels.pop(frame.last, None)
    parts += [
        Markup('<text class="round{}" x="{:.1f}" y="{}" text-anchor="{}">{}</text>').format(
            " fault" if r == origin else "", frame.x(r), _HEIGHT - 7, anchor, f"round {r}" if r == origin else str(r)
        )
        for r, anchor in labels.items()
    ]
    return Markup("").join(parts)


def short(value: float) -> str:
    """A number for a tick or a heading: whole numbers whole, four digits of the others."""
    if abs(value) < 1e7 and value == int(value):
        return str(int(value))
    plain = value == 0 or 0.01 <= abs(value) < 1e5
    return f"{value:.4g}" if plain else f"{value:.2e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def _path(frame: _Frame, line: Line) -> Markup:
    steps, pen = [], "M"
    for round_, value in line.points:
        if value is None or not math.isfinite(value) or (frame.log and value <= 0):
            pen = "M"
            continue
        steps.append(f"{pen}{frame.x(round_):.1f} {frame.y(value):.1f}")
        pen = "L"
    return Markup('<path class="line {}" d="{}"><title>{}</title></path>').format(
        line.style, " ".join(steps), line.label
    )


def _mark(frame: _Frame, line: Line, round_: int) -> Markup:
    x, y = frame.x(round_), _TOP + 2
    value = next(v for r, v in line.points if r == round_)
    return Markup('<path class="nonfinite" d="M{:.1f} {}l8 8m0 -8l-8 8"><title>{}, round {}: {}</title></path>').format(
        x - 4, y - 4, line.label, round_, number(value)
    )


def heat_map(history: History) -> Markup:
    """Ranks down, rounds across; healthy cells are the darker the larger the gradient that the rank contributed."""
    rows, columns = history.ranks, history.rounds
    left, top, pitch = 64, 22, _CELL + _GAP
    width, height = left + len(columns) * pitch + 4, top + len(rows) * pitch + 4
    scale = _magnitudes(history)
    cells = [
        _cell(history, rank, round_, left + x * pitch, top + y * pitch, scale)
        for y, rank in enumerate(rows)
        for x, round_ in enumerate(columns)
    ]
    names = [
        Markup('<text class="rank{}" x="{}" y="{}">rank {}</text>').format(
            " fault" if rank in history.suspects else "", left - 8, top + y * pitch + 12, rank
        )
        for y, rank in enumerate(rows)
    ]
    every = max(1, math.ceil(len(columns) / 8))
    heads = [
        Markup('<text class="round{}" x="{}" y="14" text-anchor="middle">{}</text>').format(
            " fault" if r == history.origin else "", left + x * pitch + _CELL / 2, r
        )
        for x, r in enumerate(columns)
        if r == history.origin or ((r - history.origin) % every == 0)
    ]
    return Markup(
        '<svg class="heat" width="{0}" height="{1}" viewBox="0 0 {0} {1}" role="img" aria-label="{2}">{3}</svg>'
    ).format(width, height, "Ranks by rounds", Markup("").join([*heads, *names, *cells]))


def _magnitudes(history: History) -> tuple[float, float]:
    found = [math.log10(c.absmax) for c in history.cells.values() if c.absmax and math.isfinite(c.absmax)]
    return (min(found), max(found)) if found else (0.0, 0.0)


def _cell(history: History, rank: int, round_: int, x: int, y: int, scale: tuple[float, float]) -> Markup:
    cell = history.cells.get((rank, round_))
    state = history.state(rank, round_)
    style = state.value if state is not CellState.HEALTHY or cell is None else f"healthy h{_level(cell, scale)}"
    named = " named" if round_ == history.origin and rank in history.suspects else ""
    return Markup(
        '<rect class="cell {}{}" x="{}" y="{}" width="{}" height="{}" rx="3"><title>{}</title></rect>'
    ).format(style, named, x, y, _CELL, _CELL, _cell_title(cell, rank, round_))


def _level(cell: RankRound, scale: tuple[float, float]) -> int:
    """0 to 4 by the decades between the smallest and the largest gradient shown."""
    low, high = scale
    if not cell.absmax or not math.isfinite(cell.absmax) or high - low < 0.3:
        return 1
    return min(4, int(5 * (math.log10(cell.absmax) - low) / (high - low)))


def _cell_title(cell: RankRound | None, rank: int, round_: int) -> str:
    if cell is None:
        return f"rank {rank}, round {round_}: no report"
    parts = [f"rank {rank}, round {round_} (step {cell.step}): {cell.state}"]
    if cell.phases:
        parts.append("nonfinite in " + ", ".join(dict.fromkeys(cell.phases)))
    parts += [f"loss {number(cell.loss)}"] if cell.loss is not None else []
    parts += [f"gradient {number(cell.absmax)}"] if cell.absmax is not None else []
    return "; ".join(parts)


def histogram(counts: Sequence[int], low: float, high: float) -> Markup:
    """Bars over the range ``low`` to ``high``."""
    width, height, top = 260, 72, max(counts, default=1) or 1
    bar = width / max(len(counts), 1)
    bars = [
        Markup('<rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
            i * bar, height - 16 - (height - 18) * count / top, max(bar - 1, 0.5), (height - 18) * count / top
        )
        for i, count in enumerate(counts)
        if count
    ]
    ends = Markup(
        '<text class="tick start" x="0" y="{0}">{1}</text><text class="tick" x="{2}" y="{0}">{3}</text>'
    ).format(height - 3, short(low), width, short(high))
    return Markup('<svg class="histogram" viewBox="0 0 {} {}" role="img" aria-label="histogram">{}{}</svg>').format(
        width, height, Markup("").join(bars), ends
    )
