"""What one run of the user's script is to be: precision, tracing, replaced samples, whose contributions are added.

Owns the choice only; ``runner.py`` runs it in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sentinel.bundle.replayed import Precision

Pace = Literal["fast", "slow", "jump"]
"""How the recorded round is reached: by the script's own loop with nothing computed that the recorded state replaces; by the loop
with graphs and backwards, for scripts that need them; or at once, with the recorded inputs put into the first forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run. ``replaced`` samples get the rows of sample ``by``. ``peers`` are files of other ranks' contributions to the
    reductions; ``contributions`` is where this run leaves its own.
    """

    name: str
    rank: int
    precision: Precision = "same"
    pace: Pace = "fast"
    traced: bool = True
    anomaly: bool = False
    replaced: tuple[int, ...] = ()
    by: int = 0
    peers: tuple[Path, ...] = ()
    contributions: Path | None = None
    entry: str | None = None
    script: str | None = None
    timeout: float = 300.0
