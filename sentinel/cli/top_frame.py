"""One frame of ``sentinel top``: the runs of a coordinator as a terminal shows them.

Owns the layout. What it shows was asked for in ``top.py``; nothing here reads or waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sentinel.coordinator.rounds_view import RoundsAnswer
from sentinel.coordinator.snapshot import RankStatus, RunStatus
from sentinel.incidents.describe import plural, rank_list
from sentinel.incidents.model import Incident, State
from sentinel.postmortem.text import number, printable

BARS = "▁▂▃▄▅▆▇█"
CELLS = {
    "0": ("·", "dim"),
    "1": ("■", "cyan"),
    "2": ("■", "yellow"),
    "3": ("■", "bright_red"),
    "4": ("█", "bold magenta"),
}
CURVE_ROUNDS = 48
MAX_INCIDENTS = 5
MAX_RANKS = 8
STYLES = {"critical": "bold red", "warning": "yellow", "info": "dim"}


@dataclass(frozen=True, slots=True)
class RunFrame:
    """All that is shown of one run."""

    status: RunStatus
    rounds: RoundsAnswer | None
    troubled: Sequence[RankStatus]
    incidents: Sequence[Incident]


def frame(url: str, runs: Sequence[RunFrame], now: datetime) -> RenderableType:
    """The whole screen."""
    head = Text.assemble(("Sentinel", "bold"), f"  {url}  {now:%H:%M:%S} UTC")
    if not runs:
        return Group(
            head, "", "No run is being watched. Start one with: sentinel run --sentinel-join join.json train.py"
        )
    return Group(head, *(part for run in runs for part in ("", _run(run))))


def _run(run: RunFrame) -> RenderableType:
    parts: list[RenderableType] = [_head(run.status)]
    if run.rounds is not None and run.rounds.rounds:
        parts += [_curves(run.rounds), _heat(run.rounds)]
    if run.troubled:
        parts.append(_troubled(run.troubled))
    parts.append(_incidents(run.incidents))
    return Group(*parts)


def _head(status: RunStatus) -> Text:
    states = ", ".join(f"{count} {state}" for state, count in status.states.items()) or "no rank yet"
    found = f"{plural(status.open_incidents, 'incident')} open" if status.open_incidents else "nothing open"
    return Text.assemble(
        (printable(status.run_id, 64), "bold cyan"),
        "  ",
        ("ended" if status.ended else "going on", "dim" if status.ended else "green"),
        f"  {status.world_size or '?'} ranks ({states})  {status.rounds_checked} rounds  ",
        (found, "bold red" if status.open_incidents else "green"),
    )


def _curves(answer: RoundsAnswer) -> Table:
    shown = answer.rounds[-CURVE_ROUNDS:]
    table = Table.grid(padding=(0, 2))
    for name, values in (
        ("loss", [r.loss_mean for r in shown]),
        ("scale", [r.loss_scale for r in shown]),
        ("norm", [r.gradient_norm for r in shown]),
        ("s/round", [r.seconds for r in shown]),
    ):
        if any(value is not None for value in values):
            table.add_row(Text(f"  {name}", "dim"), sparkline(values), number(values[-1]))
    return table


def sparkline(values: Sequence[float | None]) -> Text:
    """A bar for each value between the smallest and the largest; ``!`` for what was NaN or infinite, a space for nothing."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    drawn = Text()
    for value in values:
        if value is None:
            drawn.append(" ")
        elif not math.isfinite(value):
            drawn.append("!", "bold magenta")
        else:
            share = (value - low) / (high - low) if high > low else 0.5
            drawn.append(BARS[min(int(share * len(BARS)), len(BARS) - 1)], "cyan")
    return drawn


def _heat(answer: RoundsAnswer) -> Table:
    shown = answer.rounds[-CURVE_ROUNDS:]
    table = Table.grid(padding=(0, 2))
    for row in range(len(shown[-1].blocks)):
        first = answer.first_rank + row * answer.ranks_per_block
        cells = Text()
        for round_ in shown:
            cells.append(*CELLS.get(round_.blocks[row : row + 1] or "0", CELLS["0"]))
        table.add_row(Text(f"  rank {first}", "dim"), cells)
    return table


def _troubled(ranks: Sequence[RankStatus]) -> Text:
    named = ", ".join(f"{r.rank} ({r.state}, round {r.last_round})" for r in ranks[:MAX_RANKS])
    more = f", … and {len(ranks) - MAX_RANKS} more" if len(ranks) > MAX_RANKS else ""
    return Text(f"  look at ranks: {named}{more}", "yellow")


def _incidents(incidents: Sequence[Incident]) -> RenderableType:
    ordered = sorted(incidents, key=lambda i: (i.state is not State.RESOLVED, i.opened_at), reverse=True)
    table = Table.grid(padding=(0, 2))
    for one in ordered[:MAX_INCIDENTS]:
        style = "dim" if one.state is State.RESOLVED else STYLES[one.severity.value]
        where = f"step {one.step}, {rank_list(one.suspect_ranks)}"
        table.add_row(Text(f"  {one.severity}", style), Text(f"{one.kind} ({one.state})", style), where, f"{one.id}")
    return table if ordered else Text("  no incidents", "green")
