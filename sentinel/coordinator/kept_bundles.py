"""What a page tells of the bundles of a run: whole or not, how large, and which samples look odd.

Owns that summary. Bundles are read, and refused, by ``sentinel/bundle``; a bundle on another host is told as such.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sentinel.bundle.manifest import Manifest, SampleFinding
from sentinel.bundle.reader import Bundle, BundleRefused
from sentinel.incidents.model import Incident

MAX_BUNDLES = 50
MAX_SUSPECTS = 4
MAX_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class OddSample:
    """One sample of a rank's batch that looks odd."""

    rank: int
    finding: SampleFinding


@dataclass(frozen=True, slots=True)
class KeptBundle:
    """One bundle. ``problem`` says why nothing more is known of it here."""

    path: str  # relative to the run directory
    manifest: Manifest | None
    odd: tuple[OddSample, ...] = ()
    problem: str = ""

    @property
    def bytes(self) -> int:
        """Size of all files that the manifest lists."""
        return sum(file.bytes for file in self.manifest.files) if self.manifest else 0


def kept_bundles(root: Callable[[str], Path], incidents: Sequence[Incident]) -> list[KeptBundle]:
    """The bundles that ``incidents`` name, newest first, each once. ``root`` gives the directory that a bundle's path begins at."""
    suspects: dict[str, tuple[int, ...]] = {}
    for incident in incidents:
        if incident.bundle is not None:
            suspects[incident.bundle] = suspects.get(incident.bundle, ()) + incident.suspect_ranks
    newest = list(suspects)[: -MAX_BUNDLES - 1 : -1]
    return [_read(root(path.rpartition("/")[2]), path, suspects[path]) for path in newest]


def _read(directory: Path, path: str, suspects: Sequence[int]) -> KeptBundle:
    try:
        bundle = Bundle.open(directory / path)
        return KeptBundle(path, bundle.manifest, _odd_samples(bundle, suspects))
    except BundleRefused as refused:
        there = (directory / path).exists()
        return KeptBundle(path, None, problem=str(refused) if there else "not on this host, or not committed yet")


def _odd_samples(bundle: Bundle, suspects: Sequence[int]) -> tuple[OddSample, ...]:
    ranks = [rank for rank in dict.fromkeys(suspects) if rank in bundle.ranks][:MAX_SUSPECTS]
    found = (OddSample(rank, finding) for rank in ranks for finding in bundle.part(rank).header.sample_findings)
    return tuple(found)[:MAX_SAMPLES]
