"""What one run of the user's script is to be: precision, tracing, replaced samples, whose contributions are added.

Owns the choice only; ``runner.py`` runs it in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sentinel.bundle.replayed import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run. ``replaced`` samples get the rows of sample ``by``. ``peers`` are files of other ranks' contributions to the
    reductions; ``contributions`` is where this run leaves its own.
    """

    name: str
    rank: int
    precision: Precision = "same"
    traced: bool = True
    anomaly: bool = False
    replaced: tuple[int, ...] = ()
    by: int = 0
    peers: tuple[Path, ...] = ()
    contributions: Path | None = None
    entry: str | None = None
    script: str | None = None
    timeout: float = 300.0
