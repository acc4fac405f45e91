"""The rounds around a fault, from the event log: what every rank lost, reduced and reported.

Owns the table of ranks and rounds that charts are drawn from. Only the rounds near the fault are kept, so a log of any length
can be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from sentinel.incidents.events import Event, Received
from sentinel.incidents.model import Incident
from sentinel.wire.messages import Evidence, Phase, RoundClosed

BEFORE, AFTER = 24, 8
RANKS_SHOWN = 48
_OWN = frozenset({Phase.INIT, Phase.PARAMS, Phase.BUFFERS, Phase.LOSS, Phase.OUTPUT, Phase.RAW, Phase.WIRE})


class CellState(StrEnum):
    """What one rank's round was."""

    HEALTHY = "healthy"
    OWN = "own"  # nonfinite in what the rank made itself
    RECEIVED = "received"  # nonfinite only in what a reduction gave back
    SKIPPED = "skipped"  # finite, and the step was left out
    ABSENT = "absent"  # no report


@dataclass(slots=True)
class RankRound:
    """One rank's round. ``norm`` is the L2 norm of the reduced gradients, ``absmax`` the largest magnitude it contributed."""

    rank: int
    round: int
    step: int
    loss: float | None = None
    loss_scale: float | None = None
    norm: float | None = None
    absmax: float | None = None
    skipped: bool = False
    closed: bool = False
    phases: list[Phase] = field(default_factory=list)

    @property
    def state(self) -> CellState:
        """The strongest thing that can be said of the round."""
        if _OWN & set(self.phases):
            return CellState.OWN
        if self.phases:
            return CellState.RECEIVED
        if not self.closed:
            return CellState.ABSENT
        return CellState.SKIPPED if self.skipped else CellState.HEALTHY


@dataclass(slots=True)
class History:
    """Rounds ``first`` to ``last`` of one attempt. ``ranks`` are those worth a row: suspects first where there are too many."""

    first: int
    last: int
    origin: int
    world_size: int
    suspects: tuple[int, ...]
    cells: dict[tuple[int, int], RankRound] = field(default_factory=dict)

    @property
    def rounds(self) -> range:
        """The rounds, in order."""
        return range(self.first, self.last + 1)

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """Every rank that reported, or should have."""
        return tuple(sorted({rank for rank, _ in self.cells} | set(range(self.world_size))))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks with a row, at most ``RANKS_SHOWN``."""
        known = self.all_ranks
        if len(known) <= RANKS_SHOWN:
            return known
        telling = [r for r in known if r in self.suspects or self._is_telling(r)]
        chosen = list(dict.fromkeys([*self.suspects, *telling, *known]))[:RANKS_SHOWN]
        return tuple(sorted(chosen))

    def _is_telling(self, rank: int) -> bool:
        cell = self.cells.get((rank, self.origin))
        return cell is None or cell.state is CellState.OWN

    def state(self, rank: int, round_: int) -> CellState:
        """State of a cell, absent where nothing was reported."""
        cell = self.cells.get((rank, round_))
        return cell.state if cell is not None else CellState.ABSENT


def history(events: Iterable[Event], incident: Incident) -> History | None:
    """The rounds around ``incident``'s origin; None if the log has none of them."""
    origin = incident.round
    cells: dict[tuple[int, int], RankRound] = {}
    for event in events:
        report = event.report if isinstance(event, Received) else None
        if not isinstance(report, RoundClosed | Evidence) or report.attempt != incident.attempt:
            continue
        if origin - BEFORE <= report.round <= origin + AFTER:
            cell = cells.setdefault((report.rank, report.round), RankRound(report.rank, report.round, report.step))
            _note(cell, report)
    if not cells:
        return None
    seen = [round_ for _, round_ in cells]
    return History(min(seen), max(*seen, origin), origin, incident.world_size, tuple(incident.suspect_ranks), cells)


def _note(cell: RankRound, report: RoundClosed | Evidence) -> None:
    if isinstance(report, Evidence):
        if report.phase in (Phase.RAW, Phase.WIRE) and report.check.nonfinite:
            cell.absmax = math.nan if report.check.nan else math.inf
        if report.phase is Phase.REDUCED and report.check.nonfinite:
            cell.norm = math.nan if report.check.nan else math.inf
        if report.check.nonfinite or report.phase not in (Phase.MISUSE, Phase.EXIT):
            cell.phases.append(report.phase)
        if report.phase is Phase.LOSS and report.value is not None:
            cell.loss = report.value
        return
    cell.closed = True
    cell.loss = report.loss if report.loss is not None else cell.loss
    cell.loss_scale, cell.skipped = report.loss_scale, report.skipped
    if cell.absmax is None:  # what is nonfinite is not in these sums
        cell.absmax = report.gradient_absmax
    norms = [one.norm for one in report.sync if one.norm]
    if cell.norm is None and norms:
        cell.norm = math.hypot(*norms)
