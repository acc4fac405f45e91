"""The story most service tests tell: two ranks, a flat image in rank 1's batch, NaN in its gradients at step 7.

Owns records and a real run directory (real database, real committed bundle) of that story; nothing in it needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save_file

from sentinel.bundle.commit import BundleRequest, PresentPart, commit
from sentinel.bundle.manifest import (
    BATCHES_FILE,
    PART_FILE,
    BatchEntry,
    Environment,
    PartHeader,
    SampleFinding,
    TensorStatistics,
)
from sentinel.coordinator.writer import LogEnded, LogExpect, PutCounts, PutIncident, PutRun, StoreWriter
from sentinel.incidents.model import (
    Attribution,
    Cause,
    Incident,
    Kind,
    RankFinding,
    Severity,
    Stage,
    State,
    utc,
)
from sentinel.wire.names import BUNDLES, DATABASE, bundle_id, rank_directory

RUN = "digits-1"
STARTED = 1_796_000_000.0
BUNDLE = bundle_id(0, 7)


def incident(**changes: Any) -> Incident:
    """The incident of the story, with ``changes``."""
    finding = RankFinding(
        rank=1,
        phase="wire",
        op="allreduce",
        group="default",
        index=0,
        dtype="float32",
        numel=4657,
        nan=4657,
        wire_absmax=0.0,
        parameters=("head.2.bias", "head.2.weight"),
        parameters_total=10,
    )
    innocent = finding.model_copy(update={"rank": 0, "phase": "reduced", "wire_absmax": 0.25})
    fields: dict[str, Any] = {
        "id": f"{BUNDLE}-01",
        "run_id": RUN,
        "kind": Kind.NONFINITE_GRADIENT,
        "severity": Severity.CRITICAL,
        "step": 7,
        "round": 7,
        "attempt": 0,
        "stage": Stage.PRE_REDUCE,
        "attribution": Attribution.RANK_LOCAL,
        "suspect_ranks": (1,),
        "parameters": ("head.2.bias", "head.2.weight"),
        "cause": Cause.DATA,
        "reason": "rank 1 put NaN into the gradient all-reduce; rank 0's own gradients were finite",
        "bundle": f"{BUNDLES}/{BUNDLE}",
        "opened_at": utc(STARTED + 5),
        "updated_at": utc(STARTED + 6),
        "state": State.OPEN,
        "rule": "raw_or_wire",
        "world_size": 2,
        "last_round": 7,
        "findings": (finding, innocent),
    }
    return Incident(**{**fields, **changes})


def header(rank: int, **changes: Any) -> PartHeader:
    """Rank ``rank``'s part of the story; only rank 1 holds the flat image."""
    flat = SampleFinding(tensor="b0.image", sample=5, what="constant", detail="every element is 7")
    fields: dict[str, Any] = {
        "run_id": RUN,
        "attempt": 0,
        "rank": rank,
        "world_size": 2,
        "node": 0,
        "round": 7,
        "step": 7,
        "state_after_step": False,
        "reason": "nonfinite gradient",
        "written_at": STARTED + 6,
        "loss": float("nan") if rank == 1 else 0.56,
        "loss_scale": 1024.0,
        "batches": (
            BatchEntry(
                index=0,
                round=7,
                source="loader",
                structure={"image": {"tensor": "b0.image"}},
                sample_indices=tuple(range(224 + rank, 256, 2)),
            ),
        ),
        "batch_statistics": (
            TensorStatistics(name="b0.image", dtype="float32", shape=(16, 1, 16, 16), minimum=0.0, maximum=16.0),
        ),
        "sample_findings": (flat,) if rank == 1 else (),
        "gradient_statistics": (
            TensorStatistics(name="head.2.bias", dtype="float32", shape=(1,), nan=1 if rank == 1 else 0),
        ),
        "environment": Environment(
            argv=("train.py",), cwd="/home/ada", python="3.11", torch="2.13", host="node0", pid=7
        ),
    }
    return PartHeader(**{**fields, **changes})


def write_part(run_dir: Path, part: PartHeader, bundle: str = BUNDLE) -> Path:
    """A part on disk as an agent leaves it."""
    place = run_dir / BUNDLES / bundle / rank_directory(part.rank)
    place.mkdir(parents=True)
    save_file({"b0.image": numpy.zeros((16, 1, 16, 16), dtype=numpy.float32)}, place / BATCHES_FILE)
    (place / PART_FILE).write_text(part.model_dump_json())
    return place


def write_bundle(run_dir: Path, ranks: tuple[int, ...] = (0, 1), world_size: int = 2) -> Path:
    """A committed bundle with the parts of ``ranks``; partial if that is not the whole world."""
    places = {rank: write_part(run_dir, header(rank)) for rank in ranks}
    request = BundleRequest(
        id=BUNDLE,
        run_id=RUN,
        attempt=0,
        round=7,
        step=7,
        world_size=world_size,
        incidents=(incident().id,),
        parts=tuple(PresentPart(rank, 0, str(place)) for rank, place in places.items()),
        missing=tuple(sorted(set(range(world_size)) - set(ranks))),
        committed_at=STARTED + 7,
    )
    commit(run_dir, request)
    return run_dir / BUNDLES / BUNDLE


def write_database(run_dir: Path, *incidents: Incident, run_ids: tuple[str, ...] = (RUN,)) -> Path:
    """A run directory whose database holds ``incidents`` and whose runs have ended."""
    run_dir.mkdir(parents=True, exist_ok=True)
    writer = StoreWriter(run_dir / DATABASE)
    writer.start()
    for run_id in run_ids:
        counts = {"rounds_checked": 12, "benign_skips": 0}
        writer.submit([PutRun(run_id, STARTED, ""), LogExpect(run_id, STARTED, 2), PutCounts(run_id, counts)])
    writer.submit([PutIncident(one) for one in incidents])
    writer.submit([LogEnded(run_id, STARTED + 20) for run_id in run_ids])
    assert writer.close(10.0)
    return run_dir
