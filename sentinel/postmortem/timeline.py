"""An incident told in time: what each rank reported around it, in the order in which the coordinator heard it.

Owns the choice of moments and their words. Like moments of many ranks in one round are one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

from pydantic import BaseModel, ConfigDict

from sentinel.incidents.describe import plural, rank_list
from sentinel.incidents.events import Event, Received, RunEnded
from sentinel.incidents.model import Incident, utc
from sentinel.postmortem.text import columns, names_text, number
from sentinel.wire.messages import (
    Disabled,
    Evidence,
    Goodbye,
    Hello,
    NodeEnded,
    PartWritten,
    Phase,
    Report,
    RoundClosed,
)

ROUNDS_BEFORE = 2
MOMENTS_SHOWN = 80
NEAR = timedelta(hours=1)

_PHASE_WORDS: dict[Phase, str] = {
    Phase.INIT: "parameters nonfinite before the first forward",
    Phase.PARAMS: "parameters nonfinite at the round's start",
    Phase.BUFFERS: "buffers nonfinite",
    Phase.LOSS: "loss",
    Phase.OUTPUT: "model output nonfinite",
    Phase.RAW: "own gradient nonfinite",
    Phase.WIRE: "gave a reduction nonfinite gradients",
    Phase.REDUCED: "got nonfinite gradients back from a reduction",
    Phase.CLIP: "a norm or square of finite gradients overflowed",
    Phase.MISUSE: "wrong use",
    Phase.APPLIED: "the optimizer was about to apply nonfinite gradients",
    Phase.EXIT: "left while the round was open",
}


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened at unix second ``at``. ``ranks`` is empty for what is no rank's."""

    at: float
    round: int | None
    ranks: tuple[int, ...]
    what: str


class MomentRecord(BaseModel):
    """A moment as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    at: str
    seconds: float
    round: int | None
    ranks: tuple[int, ...]
    what: str


class TimelineRecord(BaseModel):
    """What ``sentinel incidents show --timeline -o json`` prints."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    schema_version: Literal[1] = 1
    incident: str
    moments: tuple[MomentRecord, ...]


def timeline(incident: Incident, log: Iterable[tuple[float, Event]]) -> list[Moment]:
    """The moments of ``incident``, in order: from two rounds before its origin to its last round and the run's end."""
    found = [moment for at, event in log for moment in _moments(incident, at, event)]
    found.append(
        Moment(incident.opened_at.timestamp(), incident.round, (), f"incident {incident.id} opened: {incident.kind}")
    )
    return _merged(sorted(found, key=lambda moment: moment.at))


def timeline_text(incident: Incident, moments: list[Moment]) -> str:
    """A table; seconds count from the incident's opening."""
    origin = incident.opened_at.timestamp()
    shown = moments[:MOMENTS_SHOWN]
    rows = (
        (
            utc(moment.at).strftime("%H:%M:%S.%f")[:-3],
            f"{moment.at - origin:+.3f}",
            "-" if moment.round is None else str(moment.round),
            rank_list(moment.ranks) if moment.ranks else "-",
            moment.what,
        )
        for moment in shown
    )
    table = columns(("TIME (UTC)", "SECONDS", "ROUND", "RANKS", "WHAT"), rows)
    rest = len(moments) - len(shown)
    return f"{table}\n… and {rest} more (all of them: -o json)" if rest > 0 else table


def timeline_records(incident: Incident, moments: list[Moment]) -> tuple[MomentRecord, ...]:
    """For ``-o json``."""
    origin = incident.opened_at.timestamp()
    return tuple(
        MomentRecord(
            at=utc(moment.at).isoformat().replace("+00:00", "Z"),
            seconds=round(moment.at - origin, 6),
            round=moment.round,
            ranks=moment.ranks,
            what=moment.what,
        )
        for moment in moments
    )


def _moments(incident: Incident, at: float, event: Event) -> Iterator[Moment]:
    if isinstance(event, RunEnded):
        yield Moment(at, None, (), "run ended")
    report = event.report if isinstance(event, Received) else None
    if report is None or getattr(report, "attempt", incident.attempt) != incident.attempt:
        return
    round_ = getattr(report, "round", None)
    if (
        round_ is not None
        and not incident.round - ROUNDS_BEFORE <= round_ <= max(incident.last_round, incident.round) + 1
    ):
        return
    words = _words(report)
    if words:
        rank = getattr(report, "rank", None)
        yield Moment(at, round_, () if rank is None else (rank,), words)


def _words(report: Report) -> str:
    if isinstance(report, Evidence):
        return _evidence(report)
    if isinstance(report, RoundClosed):
        return _closed(report)
    if isinstance(report, PartWritten):
        return f"could not write its part: {report.error}" if report.error else "wrote its part of the bundle"
    if isinstance(report, Disabled):
        return f"agent switched itself off: {report.reason}"
    if isinstance(report, Goodbye):
        return "ended" if report.clean else f"ended after an error: {report.reason or 'unknown'}"
    if isinstance(report, NodeEnded):
        return f"node {report.node}: all processes gone, exit code {report.exit_code}"
    return "agent is up" if isinstance(report, Hello) else ""


def _evidence(report: Evidence) -> str:
    words = _PHASE_WORDS[report.phase]
    if report.phase is Phase.LOSS:
        words = f"loss is {number(report.value)}"
    elif report.collective is not None:
        words += f" ({report.collective.op} #{report.collective.index}, {report.collective.dtype})"
    if report.parameters:
        words += f": {names_text(report.parameters, report.parameters_total, 2)}"
    return f"{words}; {report.note}" if report.note else words


def _closed(report: RoundClosed) -> str:
    how = "step skipped" if report.skipped else f"round closed by {report.closed_by.replace('_', ' ')}"
    if not report.evidence and not report.skipped:
        return f"{how}, healthy"
    return f"{how}, {plural(report.evidence, 'finding')} sent" if report.evidence else how


def _merged(moments: list[Moment]) -> list[Moment]:
    """Moments alike but for the rank become one, at the time of the first."""
    found: dict[tuple[int | None, str], Moment] = {}
    for moment in moments:
        key = (moment.round, moment.what)
        earlier = found.get(key)
        ranks = tuple(sorted({*(earlier.ranks if earlier else ()), *moment.ranks}))
        found[key] = replace(earlier or moment, ranks=ranks)
    return sorted(found.values(), key=lambda moment: moment.at)
