"""A report as text, for a terminal or a job's log.

Owns the order of the blocks; the incident's and the bundle's pages are ``incident_page.py``'s and ``bundle_page.py``'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sentinel.bundle.reader import BundleRefused
from sentinel.bundle.replayed import ReplayRecord
from sentinel.postmortem.bundle_page import describe_bundle
from sentinel.postmortem.incident_page import SampleLine, describe_incident
from sentinel.postmortem.lint.output import text_report
from sentinel.postmortem.report.advice import next_steps
from sentinel.postmortem.report.facts import Facts
from sentinel.postmortem.text import labelled, printable


def report_text(facts: Sequence[Facts]) -> str:
    """All reports, one after the other."""
    return "\n\n\n".join("\n\n".join(_blocks(one)) for one in facts) or "No incidents."


def _blocks(facts: Facts) -> Iterator[str]:
    if facts.incident is not None:
        samples = [SampleLine(b.rank, s) for b in facts.batches if b.suspect for s in b.sentences[:8]]
        yield describe_incident(facts.incident, facts.run_dir, samples).partition("\n\nBundle\n")[0]
    elif facts.bundle is not None:
        try:
            yield describe_bundle(facts.bundle)
        except BundleRefused as refusal:
            yield f"the bundle cannot be read in full: {printable(str(refusal), 300)}"
    if facts.layers is not None and facts.layers.sentences and facts.incident is not None:
        yield "\n".join(["Layers", *(f"  {printable(sentence, 400)}" for sentence in facts.layers.sentences)])
    yield from (_replay(replay) for replay in facts.replays)
    if facts.lint:
        yield f"Lint of {printable(facts.script, 300)}\n{text_report(facts.lint)}"
    if facts.missing:
        yield "\n".join(["Not here", *(f"  {printable(line, 300)}" for line in facts.missing)])
    steps = (
        line
        for step in next_steps(facts)
        for line in (f"  {printable(step.why, 300)}", f"    {step.command}")
        if line.strip()
    )
    yield "\n".join(["Next", *(printable(line, 500) for line in steps)])


def _replay(replay: ReplayRecord) -> str:
    bad = replay.first_bad_op
    pairs = [
        ("replayed", f"rank {replay.rank}: {'reproduced' if replay.reproduced else 'not reproduced'}"),
        ("cause", f"{replay.cause}: {replay.reason}"),
        ("precision", ", ".join(f"{name} {found}" for name, found in replay.precision.items())),
    ]
    if bad is not None:
        pairs.append(("first bad op", " ".join(filter(None, (bad.op, bad.phase, bad.module, bad.line, bad.code)))))
    if replay.samples:
        pairs.append(("samples", ", ".join(str(sample) for sample in replay.samples)))
    return labelled(pairs)
