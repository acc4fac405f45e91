"""Odd samples of a rank's batches, as sentences: which sample, which tensor, which index of the data set.

Owns the sentences. What counts as odd was decided by the agent when it wrote the part (``SampleFinding``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sentinel.bundle.manifest import BatchEntry, PartHeader, SampleFinding
from sentinel.bundle.reader import Bundle, BundleRefused
from sentinel.incidents.model import Incident
from sentinel.postmortem.incident_page import SampleLine
from sentinel.postmortem.text import printable

RANKS_READ = 4
LINES_SHOWN = 8

_WHAT = {"nan": "holds NaN", "inf": "holds infinities", "constant": "is constant (zero variance)"}
_SOURCE = {"loader": "the DataLoader's batch", "forward": "the model's input"}


def odd_samples(incident: Incident, run_dir: Path | None) -> list[SampleLine]:
    """What the suspects' parts say; nothing if the bundle is elsewhere, or cannot be read (``dump verify`` says why)."""
    if run_dir is None or incident.bundle is None:
        return []
    try:
        bundle = Bundle.open(run_dir / incident.bundle)
        read = [rank for rank in bundle.ranks if rank in incident.suspect_ranks][:RANKS_READ]
        lines = [SampleLine(rank, text) for rank in read for text in sample_sentences(bundle.part(rank).header)]
    except BundleRefused:
        return []
    return lines[:LINES_SHOWN]


def sample_sentences(header: PartHeader) -> list[str]:
    """One sentence per odd sample of a part, in the order found."""
    return [_sentence(finding, header.batches) for finding in header.sample_findings]


def _sentence(finding: SampleFinding, batches: Sequence[BatchEntry]) -> str:
    prefix, _, name = finding.tensor.partition(".")
    batch = next((b for b in batches if f"b{b.index}" == prefix), None)
    where = f"{_SOURCE[batch.source]}, tensor {printable(name or '?', 80)}" if batch else printable(finding.tensor, 80)
    index = _data_set_index(finding.sample, batch)
    detail = f": {printable(finding.detail, 120)}" if finding.detail else ""
    return f"sample {finding.sample}{index} of {where} {_WHAT[finding.what]}{detail}"


def _data_set_index(sample: int, batch: BatchEntry | None) -> str:
    indices = batch.sample_indices if batch else None
    return f" (data set index {indices[sample]})" if indices and sample < len(indices) else ""
