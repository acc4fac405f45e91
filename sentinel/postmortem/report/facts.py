"""Everything a report says, gathered once: the page, the text and the JSON are renderings of it.

Owns the gathering. Reads one bundle and the event log it is handed; what cannot be read is left out and said in ``missing``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from sentinel.bundle.manifest import PartHeader
from sentinel.bundle.paths import entries, open_directory, read_json
from sentinel.bundle.reader import Bundle, BundleRefused
from sentinel.bundle.replayed import ReplayRecord, is_replay_file
from sentinel.incidents.events import Event
from sentinel.incidents.model import Incident
from sentinel.postmortem.layers import LayerStory, layer_story
from sentinel.postmortem.lint.finding import Finding
from sentinel.postmortem.report.batch import BatchView, Proven, batch_view
from sentinel.postmortem.report.matrix import Matrix, matrices
from sentinel.postmortem.report.rounds import History, history
from sentinel.postmortem.report.script import script_findings

PARTS_READ = 24
BATCHES_SHOWN = 2


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one incident (or of one bundle, where no incident is at hand)."""

    incident: Incident | None
    run_dir: Path | None
    bundle: Bundle | None
    headers: tuple[PartHeader, ...]
    history: History | None
    batches: tuple[BatchView, ...]
    matrices: tuple[Matrix, ...]
    layers: LayerStory | None
    replays: tuple[ReplayRecord, ...]
    script: str
    lint: tuple[Finding, ...]
    missing: tuple[str, ...]

    @property
    def proven(self) -> ReplayRecord | None:
        """The replay that settled the cause, if one did. One of another round proves nothing about this incident."""
        round_ = self.incident.round if self.incident else None
        fits = (r for r in self.replays if round_ in (None, r.round))
        return next((r for r in fits if r.reproduced and r.cause != "unknown"), None)

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks that the verdict names."""
        return self.incident.suspect_ranks if self.incident else ()


def gather(incident: Incident | None, bundle_path: Path | None, run_dir: Path | None, events: Iterable[Event]) -> Facts:
    """The facts of ``incident``, of the bundle at ``bundle_path``, or of both. Never raises for what is damaged or not there."""
    missing: list[str] = []
    bundle = _bundle(bundle_path, missing)
    suspects = incident.suspect_ranks if incident else ()
    headers = _headers(bundle, suspects, missing)
    script, lint = script_findings(headers, run_dir)
    replays = _replays(bundle, missing)
    shown = headers[:BATCHES_SHOWN]
    return Facts(
        incident,
        run_dir,
        bundle,
        headers,
        history(events, incident) if incident else None,
        tuple(batch_view(bundle, h, h.rank in suspects, _proven(replays, h.rank)) for h in shown) if bundle else (),
        matrices(sorted(headers, key=lambda h: h.rank)),
        layer_story(headers),
        replays,
        script,
        lint,
        tuple(missing),
    )


def _proven(replays: Sequence[ReplayRecord], rank: int) -> Proven | None:
    """The samples that a replay of this rank found guilty."""
    own = next((r for r in replays if r.rank == rank and r.samples), None)
    size = own.first_bad_op.batch_size if own is not None and own.first_bad_op is not None else None
    return Proven(own.samples, size) if own is not None and size is not None else None


def _bundle(path: Path | None, missing: list[str]) -> Bundle | None:
    if path is None:
        return None
    try:
        return Bundle.open(path)
    except BundleRefused as refusal:
        missing.append(f"the bundle cannot be read: {refusal}")
        return None


def _headers(bundle: Bundle | None, suspects: Sequence[int], missing: list[str]) -> tuple[PartHeader, ...]:
    """Headers of the parts here, suspects first, then the others in order."""
    found = []
    ranks = sorted(bundle.ranks if bundle else (), key=lambda rank: (rank not in suspects, rank))
    for rank in ranks[:PARTS_READ]:
        try:
            assert bundle is not None, "ranks come from it"
            found.append(bundle.part(rank).header)
        except BundleRefused as refusal:
            missing.append(f"the part of rank {rank} cannot be read: {refusal}")
    if bundle is not None and bundle.manifest is not None and bundle.manifest.missing_ranks:
        missing.append(f"the bundle is partial: nothing whole from {len(bundle.manifest.missing_ranks)} rank(s)")
    return tuple(found)


def _replays(bundle: Bundle | None, missing: list[str]) -> tuple[ReplayRecord, ...]:
    """Records of replays that lie beside the parts."""
    if bundle is None:
        return ()
    found = []
    with open_directory(bundle.path) as directory:
        for name in sorted(filter(is_replay_file, entries(directory))):
            try:
                found.append(ReplayRecord.model_validate_json(read_json(name, directory)))
            except (BundleRefused, ValidationError) as problem:
                missing.append(f"{name} cannot be read: {str(problem).splitlines()[0]}")
    return tuple(found)
