"""A report as one HTML page that needs nothing else: no script, no font, no image from elsewhere.

Owns rendering. Every value is escaped by the template engine; the page's own policy (CSP) forbids scripts and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from sentinel import __version__
from sentinel.incidents.describe import rank_list
from sentinel.postmortem.report.advice import Step, next_steps
from sentinel.postmortem.report.curves import Curve, curves, layer_curve
from sentinel.postmortem.report.facts import Facts
from sentinel.postmortem.report.rounds import CellState
from sentinel.postmortem.report.svg import heat_map, histogram, short
from sentinel.postmortem.text import number
from sentinel.postmortem.wording import CAUSE_WORDS, STAGE_WORDS, attribution_sentence, verdict_sentence

STATE_WORDS: dict[CellState, str] = {
    CellState.HEALTHY: "healthy (darker: larger gradient)",
    CellState.OWN: "nonfinite in what the rank made itself",
    CellState.RECEIVED: "nonfinite only after the reduction",
    CellState.SKIPPED: "step skipped, values finite",
    CellState.ABSENT: "no report",
}


@dataclass(frozen=True, slots=True)
class Section:
    """One incident's facts with its drawings."""

    facts: Facts
    heat: Markup | None
    states: tuple[CellState, ...]
    curves: tuple[Curve, ...]
    steps: tuple[Step, ...]


def report_html(facts: Sequence[Facts], title: str, now: datetime | None = None) -> str:
    """The page. ``now`` is when it was made (default: the clock)."""
    environment = _environment()
    style = environment.get_template("report.css").render()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("report.html").render(
        title=title,
        style=Markup(style),  # noqa: S704 - our own file
        policy=f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        sections=[_section(one) for one in facts],
        made=(now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )


def _section(facts: Facts) -> Section:
    past = facts.history
    states = {past.state(rank, round_) for rank in past.ranks for round_ in past.rounds} if past else set()
    return Section(
        facts,
        heat_map(past) if past else None,
        tuple(state for state in CellState if state in states),
        _curves(facts),
        next_steps(facts),
    )


def _curves(facts: Facts) -> tuple[Curve, ...]:
    """Around the fault: what the event log has of every rank, and what the bundle has of every layer."""
    past = facts.history
    origin = facts.incident.round if facts.incident else max((h.round for h in facts.headers), default=0)
    by_layer = layer_curve(facts.layers, origin) if facts.layers else None
    return (*(curves(past) if past else ()), *([by_layer] if by_layer is not None else []))


def _ticks(text: str) -> Markup:
    """Text in which `code` between backticks is set as code."""
    parts = [
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(text.split("`"))
    ]
    return Markup("").join(parts)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("sentinel.postmortem.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "number": number,
        "ranks": rank_list,
        "histogram": histogram,
        "shape": lambda shape: "x".join(str(n) for n in shape) or "scalar",
        "verdict": verdict_sentence,
        "attribution": attribution_sentence,
        "short": short,
        "ticks": _ticks,
    }
    made.globals |= {"stage_words": STAGE_WORDS, "cause_words": CAUSE_WORDS, "state_words": STATE_WORDS}
    return made
