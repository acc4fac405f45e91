"""How a rule puts a verdict together: suspects, attribution, words for parameters, findings.

Owns no decision: which verdict it is, the rules say.
"""

from __future__ import annotations

from sentinel.incidents.describe import findings, parameters_of, plural, rank_list
from sentinel.incidents.finding import attribution_of
from sentinel.incidents.model import Attribution, Cause, Kind, Severity, Stage, Verdict
from sentinel.incidents.view import View
from sentinel.wire.messages import ANOMALY, Evidence, Phase


def verdict_on(
    view: View,
    rule: str,
    kind: Kind,
    stage: Stage,
    seen: list[Evidence],
    cause: Cause,
    reason: str,
    *,
    severity: Severity = Severity.CRITICAL,
    attribution: Attribution | None = None,
    suspects: tuple[int, ...] | None = None,
) -> Verdict:
    """The verdict of ``rule`` on the evidence it has ``seen``; suspects are its ranks unless they are given."""
    ranks = ranks_of(seen) if suspects is None else suspects
    missing = f" (reports of {rank_list(view.missing)} are missing)" if view.missing and "missing" not in reason else ""
    return Verdict(
        rule=rule,
        kind=kind,
        stage=stage,
        attribution=attribution or attribution_of(ranks, group_of(view, seen)),
        suspect_ranks=ranks,
        severity=severity,
        cause=cause,
        reason=reason + missing,
        parameters=parameters_of(seen) or parameters_of(view.window.of_phase(Phase.APPLIED)),
        missing_ranks=view.missing,
        findings=findings(view.window, ranks),
    )


def group_of(view: View, seen: list[Evidence]) -> tuple[int, ...]:
    """All ranks of the groups that the evidence is about."""
    return tuple(sorted({rank for e in seen for rank in view.group_of(e)})) or view.world


def ranks_of(seen: list[Evidence]) -> tuple[int, ...]:
    """Whose evidence it is."""
    return tuple(sorted({e.rank for e in seen}))


def when_seen(seen: list[Evidence]) -> str:
    """When gradients were found nonfinite."""
    if any(e.collective is not None for e in seen):
        return "before the reduction"
    return "in their backward" if any(e.note.startswith(ANOMALY) for e in seen) else "when they were applied"


def names_of(seen: list[Evidence]) -> str:
    """The first parameter that the evidence names, and how many others."""
    names = parameters_of(seen)
    stopped = next((e.note for e in seen if e.note.startswith(ANOMALY)), "")
    if stopped:
        return f"torch's {stopped}"
    total = max(len(names), *(e.parameters_total for e in seen)) if seen else 0
    if not names:
        return "parameters not named"
    return f"{names[0]} and {plural(total - 1, 'other parameter')}" if total > 1 else names[0]
