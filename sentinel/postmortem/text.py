"""Plain text for terminals: aligned columns, labelled lines, and names made harmless.

Owns layout only; what is said is in ``wording.py`` and the pages. Names, notes and paths come from training processes, so they
pass ``printable`` before they reach a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def printable(text: str, limit: int = 200) -> str:
    """``text`` on one line, without control characters or lone surrogates, cut at ``limit`` characters."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "") -> str:
    """A table with left-aligned columns and no ruling, as ``kubectl`` users know it; each cell is made printable."""
    table = [list(header), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    return "\n".join(
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def labelled(pairs: Iterable[tuple[str, str]]) -> str:
    """``label  value`` lines, values aligned."""
    kept = [(label, printable(value, 400)) for label, value in pairs]
    width = max((len(label) for label, _ in kept), default=0)
    return "\n".join(f"{label.ljust(width)}  {value}" for label, value in kept)


def names_text(names: Sequence[str], total: int, limit: int = 4) -> str:
    """The first names and how many there are in all."""
    shown = ", ".join(printable(name) for name in names[:limit])
    rest = max(total, len(names)) - min(limit, len(names))
    return f"{shown} and {rest} more" if rest > 0 else shown


def number(value: float | None) -> str:
    """A float for people: short, NaN and infinities spelt out, ``-`` for none."""
    return "-" if value is None else f"{value:.4g}"
