"""What a user reads from Sentinel when a run starts and when it is over.

Owns which facts are said and in which order; the sentences about a verdict are ``postmortem/wording.py``'s. Pure text from
incidents and run directory; printing is ``console.py``'s.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from sentinel.bundle.manifest import PART_FILE, PartHeader, SampleFinding
from sentinel.incidents.describe import plural
from sentinel.incidents.model import Incident, Severity
from sentinel.launch.relay import Drained
from sentinel.postmortem.text import names_text, printable
from sentinel.postmortem.wording import attribution_sentence, verdict_sentence
from sentinel.wire.names import SPOOL, rank_directory

COLUMNS = 100
MAX_INCIDENTS = 5
MAX_SAMPLES = 3  # findings named per incident
MAX_SUSPECTS = 4  # ranks whose part is read for findings
MAX_PART_BYTES = 16 << 20

_FINDING_WORDS = {"constant": "is constant (zero variance)", "nan": "holds NaN", "inf": "holds infinities"}


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """All that the last words need. ``incidents`` None: another node's coordinator has them, or none was reached."""

    run_dir: Path
    incidents: Sequence[Incident] | None
    rounds_checked: int = 0
    benign_skips: int = 0
    drained: Drained | None = None
    http: str | None = None
    elsewhere: str | None = None  # endpoint of the coordinator that has the incidents
    unwatched_ranks: int = 0  # whose agent switched itself off
    guard_skips: int = 0  # steps that the guard left out
    halted: bool = False


def opening(run_id: str, run_dir: Path, http: str | None) -> str:
    """The one line at the start."""
    pages = f" · {http}" if http else ""
    return f"run {printable(run_id, 64)} · {shown(run_dir)}{pages}"


def closing(outcome: RunOutcome) -> list[str]:
    """The last words: a line or two for a healthy run, a paragraph per incident otherwise."""
    return [*_found(outcome), *_guarded(outcome), *_unwatched(outcome), *_losses(outcome)]


def shown(path: Path) -> str:
    """``path`` as the user would type it here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def sample_findings(run_dir: Path, incident: Incident) -> list[str]:
    """What the suspects' own parts say about single samples of their batches. Parts that cannot be read say nothing."""
    if incident.bundle is None:
        return []
    sentences = []
    for rank in incident.suspect_ranks[:MAX_SUSPECTS]:
        part = _part(run_dir / incident.bundle / rank_directory(rank) / PART_FILE)
        if part is not None:
            sentences += [_finding_sentence(part, finding) for finding in _of_the_round(part)]
    return list(dict.fromkeys(sentences))


def _found(outcome: RunOutcome) -> list[str]:
    if outcome.incidents is None:
        where = outcome.http or outcome.elsewhere
        if where:
            return [f"incidents of this run are with the coordinator at {where}"]
        return [f"no coordinator was reached: nothing was judged; run directory {shown(outcome.run_dir)}"]
    if not outcome.incidents:
        return [_healthy(outcome)]
    rounds = f" in {plural(outcome.rounds_checked, 'round')}" if outcome.rounds_checked else ""
    lines = [
        f"{plural(len(outcome.incidents), 'incident')}{rounds}: training met non-finite values or a wrong reduction"
    ]
    for incident in outcome.incidents[:MAX_INCIDENTS]:
        lines += ["", *_paragraph(outcome.run_dir, incident)]
    more = len(outcome.incidents) - MAX_INCIDENTS
    if more > 0:
        lines += ["", f"and {more} more: sentinel incidents ls --run-dir {shown(outcome.run_dir)}"]
    return [*lines, "", *_next_commands(outcome)]


def _healthy(outcome: RunOutcome) -> str:
    skips = f", {plural(outcome.benign_skips, 'benign GradScaler skip')}" if outcome.benign_skips else ""
    if not outcome.rounds_checked:
        return f"no incidents, but no round of training was seen either · {shown(outcome.run_dir)}"
    return f"no incidents in {plural(outcome.rounds_checked, 'round')}{skips} · {shown(outcome.run_dir)}"


def _guarded(outcome: RunOutcome) -> list[str]:
    lines = []
    if outcome.guard_skips:
        steps = plural(outcome.guard_skips, "step")
        lines.append(f"the guard left out {steps} with nonfinite gradients, on every rank; parameters were not touched")
    if outcome.halted:
        lines.append("the guard halted the training on every rank: exit code 93, not restarted")
    return lines


def _unwatched(outcome: RunOutcome) -> list[str]:
    if not outcome.unwatched_ranks:
        return []
    ranks = plural(outcome.unwatched_ranks, "rank")
    return [
        f"the agent of {ranks} switched itself off: from then on training was unwatched there (see the lines above)"
    ]


def _paragraph(run_dir: Path, incident: Incident) -> list[str]:
    severity = "" if incident.severity is Severity.CRITICAL else f" ({incident.severity})"
    total = max((f.parameters_total for f in incident.findings), default=0)
    samples = sample_findings(run_dir, incident)
    rows = [
        ("who", attribution_sentence(incident)),
        ("seen", printable(incident.reason, 400)),
        ("tensors", names_text(incident.parameters, total) if incident.parameters else ""),
        *(("sample", sentence) for sentence in samples[:MAX_SAMPLES]),
        ("sample", f"and {len(samples) - MAX_SAMPLES} more findings" if len(samples) > MAX_SAMPLES else ""),
        ("bundle", shown(run_dir / incident.bundle) if incident.bundle else ""),
    ]
    seen_again = f" Seen in {incident.occurrences} rounds." if incident.occurrences > 1 else ""
    head = f"  {verdict_sentence(incident)}{severity}{seen_again}"
    return [head, *(line for label, text in rows if text for line in _row(label, text))]


def _row(label: str, text: str) -> list[str]:
    """A labelled text, continued below itself; paths and names stay whole, so that they can be copied."""
    first, rest = f"    {label:<8} ", " " * 13
    return textwrap.wrap(
        text, COLUMNS, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _next_commands(outcome: RunOutcome) -> list[str]:
    """What to type now, for the first incident (the origin of what followed)."""
    incidents = outcome.incidents or ()
    run_dir = shown(outcome.run_dir)
    commands = [f"sentinel incidents show {incidents[0].id} --run-dir {run_dir}"]
    bundle = next((incident.bundle for incident in incidents if incident.bundle), None)
    if bundle:
        commands += [f"sentinel dump {verb} {shown(outcome.run_dir / bundle)}" for verb in ("show", "verify")]
    return ["next:", *(f"  {command}" for command in commands)]


def _losses(outcome: RunOutcome) -> list[str]:
    if outcome.drained is None:
        return []
    lines = []
    unsent = outcome.drained.unsent_critical
    if unsent:
        spool = shown(outcome.run_dir / SPOOL)
        lines.append(f"{plural(unsent, 'report')} that may hold an incident reached no coordinator; kept in {spool}")
    lost = {reason: count for reason, count in outcome.drained.drops.items() if count}
    if lost:
        lines.append("reports dropped: " + ", ".join(f"{count} {reason}" for reason, count in sorted(lost.items())))
    return lines


def _part(path: Path) -> PartHeader | None:
    try:
        if path.stat().st_size > MAX_PART_BYTES:
            return None
        return PartHeader.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _of_the_round(part: PartHeader) -> list[SampleFinding]:
    """Findings in the batches of the part's own round; the window also holds the round before."""
    rounds = {f"b{entry.index}": entry.round for entry in part.batches}
    return [f for f in part.sample_findings if rounds.get(_batch(f), part.round) == part.round]


def _batch(finding: SampleFinding) -> str:
    """``b<i>`` of a tensor's name ``b<i>.<path in the batch>``."""
    return finding.tensor.partition(".")[0]


def _finding_sentence(part: PartHeader, finding: SampleFinding) -> str:
    batch, _, path = finding.tensor.partition(".")
    tensor = printable(path if path and re.fullmatch(r"b\d+", batch) else finding.tensor, 80)
    return f"sample {finding.sample} of batch tensor '{tensor}' on rank {part.rank} {_FINDING_WORDS[finding.what]}"
