"""Evidence in words and rows: rank lists, parameter names, findings that stay with an incident.

Owns wording only; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from sentinel.incidents.model import RankFinding
from sentinel.incidents.window import RoundWindow
from sentinel.wire.messages import Evidence, Phase

MAX_PARAMETERS = 32
MAX_FINDINGS = 32
MAX_NAMED_RANKS = 8


def plural(count: int, noun: str) -> str:
    """``1 parameter``, ``3 parameters``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0 and 1``, ``ranks 0, 1, 2 … (16384 ranks)``."""
    if not ranks:
        return "no rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= MAX_NAMED_RANKS:
        return f"ranks {', '.join(str(r) for r in ranks[:-1])} and {ranks[-1]}"
    return f"ranks {', '.join(str(r) for r in ranks[:3])} … ({len(ranks)} ranks)"


def loss_words(seen: Sequence[Evidence], ranks: Sequence[int], where: str) -> str:
    """What the evidence of a nonfinite loss says; a forward that raised before it came to a loss left other things behind."""
    left = next((e for e in seen if e.phase is Phase.OUTPUT), None)
    if left is None:
        return f"the loss was nonfinite on {rank_list(ranks)}, {where}"
    return f"the forward of {rank_list(ranks)} had computed NaN when it raised, before there was a loss ({left.note})"


def parameters_of(seen: Sequence[Evidence]) -> tuple[str, ...]:
    """Names in the order met, each once, at most ``MAX_PARAMETERS``."""
    names = dict.fromkeys(name for e in seen for name in e.parameters)
    return tuple(names)[:MAX_PARAMETERS]


def findings(window: RoundWindow, suspects: Sequence[int]) -> tuple[RankFinding, ...]:
    """Rows that stay with the incident: the suspects' evidence first, then the others', at most ``MAX_FINDINGS``."""
    suspected = set(suspects)
    ordered = sorted(window.evidence, key=lambda e: (e.rank not in suspected, e.rank, e.order))
    return tuple(_finding(e) for e in ordered[:MAX_FINDINGS])


def _finding(evidence: Evidence) -> RankFinding:
    one = evidence.collective
    return RankFinding(
        rank=evidence.rank,
        phase=evidence.phase.value,
        op=one.op if one else None,
        group=one.group if one else None,
        index=one.index if one else None,
        dtype=one.dtype if one else None,
        numel=evidence.check.numel,
        nan=evidence.check.nan,
        inf=evidence.check.inf,
        absmax=evidence.check.absmax,
        wire_absmax=one.wire.absmax if one else None,
        loss=evidence.value,
        parameters=evidence.parameters,
        parameters_total=evidence.parameters_total,
        note=evidence.note,
    )
