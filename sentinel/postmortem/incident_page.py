"""One incident as a page of text that a stranger understands: verdict, evidence of each rank, bundle, next commands.

Owns the page. Reads nothing: what a bundle adds (``SampleLine``) is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sentinel.incidents.describe import rank_list
from sentinel.incidents.model import Incident, RankFinding
from sentinel.postmortem.text import columns, labelled, names_text, number, printable
from sentinel.postmortem.wording import CAUSE_WORDS, GUARD_WORDS, attribution_sentence, verdict_sentence
from sentinel.wire.messages import Guarded

FINDINGS_SHOWN = 16
_TABLE = ("RANK", "PHASE", "OP", "DTYPE", "ELEMENTS", "NAN", "INF", "ABSMAX", "ABSMAX SENT", "LOSS")


@dataclass(frozen=True, slots=True)
class SampleLine:
    """Something odd about one sample of a rank's batch, as a sentence."""

    rank: int
    sentence: str


def describe_incident(incident: Incident, run_dir: Path | None = None, samples: Sequence[SampleLine] = ()) -> str:
    """The page. ``run_dir`` makes bundle and commands concrete; without it they are relative to the run directory."""
    blocks = [_verdict(incident), _evidence(incident)]
    if samples:
        lines = "\n".join(f"  rank {line.rank}: {printable(line.sentence)}" for line in samples)
        blocks.append(f"Odd samples in the batch\n{lines}")
    blocks.append(_next(incident, run_dir))
    return "\n\n".join(block for block in blocks if block)


def _verdict(incident: Incident) -> str:
    lines = [
        ("incident", f"{incident.id}  ({incident.kind}, {incident.severity}, {incident.state})"),
        ("verdict", verdict_sentence(incident)),
        ("whose", attribution_sentence(incident)),
        ("why", incident.reason),
        ("cause", f"first reading: {CAUSE_WORDS[incident.cause]}"),
        ("when", _when(incident)),
        *_acted(incident),
        ("run", f"{incident.run_id}, attempt {incident.attempt}, {incident.world_size or '?'} ranks"),
    ]
    if incident.parameters:
        total = max((finding.parameters_total for finding in incident.findings), default=0)
        lines.append(("parameters", names_text(incident.parameters, total)))
    if incident.missing_ranks:
        lines.append(("not heard", f"{rank_list(incident.missing_ranks)}: judged without them"))
    return labelled(lines)


def _when(incident: Incident) -> str:
    again = f", seen in {incident.occurrences} rounds up to {incident.last_round}" if incident.occurrences > 1 else ""
    opened = incident.opened_at.strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"step {incident.step} (round {incident.round}), detected {opened}{again}"


def _evidence(incident: Incident) -> str:
    if not incident.findings:
        return ""
    shown = incident.findings[:FINDINGS_SHOWN]
    table = columns(_TABLE, (_row(finding) for finding in shown), indent="  ")
    rest = len(incident.findings) - len(shown)
    more = f"\n  … and {rest} more (all of them: -o json)" if rest else ""
    notes = "".join(f"\n  rank {f.rank}: {printable(f.note)}" for f in shown if f.note)
    return f"What each rank saw\n{table}{more}{notes}"


def _row(finding: RankFinding) -> tuple[str, ...]:
    return (
        str(finding.rank),
        finding.phase,
        finding.op or "-",
        finding.dtype or "-",
        str(finding.numel),
        str(finding.nan),
        str(finding.inf),
        number(finding.absmax),
        number(finding.wire_absmax),
        number(finding.loss),
    )


def _next(incident: Incident, run_dir: Path | None) -> str:
    where = f" --run-dir {run_dir}" if run_dir else ""
    export = f"sentinel incidents export {incident.id}{where}"
    if incident.bundle is None:
        return f"No bundle was kept.\n\nNext\n  {printable(export, 400)}"
    bundle = str(run_dir / incident.bundle) if run_dir else incident.bundle
    commands = (f"sentinel dump show {bundle}", f"sentinel dump verify {bundle}", export)
    return "\n".join(
        ["Bundle", f"  {printable(bundle, 400)}", "", "Next", *(f"  {printable(c, 400)}" for c in commands)]
    )


def _acted(incident: Incident) -> list[tuple[str, str]]:
    """What was done about it, by the guard and by people."""
    acted = []
    if incident.guard is not Guarded.NO:
        acted.append(("guard", GUARD_WORDS[incident.guard]))
    if incident.acknowledged_at is not None:
        note = f": {incident.acknowledged_note}" if incident.acknowledged_note else ""
        acted.append(
            ("seen by", f"{incident.acknowledged_by} at {incident.acknowledged_at:%Y-%m-%d %H:%M:%S} UTC{note}")
        )
    return acted
