"""Bundles on a real disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sentinel.bundle.commit import BundleRequest, PresentPart
from sentinel.bundle.manifest import PARAMETERS_FILE, PART_FILE, Environment, PartHeader

MakePart = Callable[..., Path]


@pytest.fixture
def header() -> PartHeader:
    """The header of rank 0's part of round 3."""
    environment = Environment(argv=("train.py",), cwd="/", python="3.11", torch="2", host="h", pid=1)
    return PartHeader(
        run_id="run",
        attempt=0,
        rank=0,
        world_size=2,
        node=0,
        round=3,
        step=3,
        state_after_step=False,
        reason="evidence",
        written_at=1.0,
        loss=float("nan"),
        environment=environment,
    )


@pytest.fixture
def make_part(tmp_path: Path, header: PartHeader) -> MakePart:
    """Writes one rank's part and returns its directory."""

    def make(rank: int, **changes: object) -> Path:
        part = tmp_path / "bundles" / "a0-r000003" / f"rank-{rank:05d}"
        part.mkdir(parents=True)
        (part / PART_FILE).write_text(header.model_copy(update={"rank": rank, **changes}).model_dump_json())
        save_file({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, part / PARAMETERS_FILE)
        return part

    return make


@pytest.fixture
def request_of(tmp_path: Path) -> Callable[..., BundleRequest]:
    """A request to commit the bundle, saying that these ranks reported a part."""

    def make(*ranks: int, **changes: object) -> BundleRequest:
        bundle = tmp_path / "bundles" / "a0-r000003"
        request = BundleRequest(
            id="a0-r000003",
            run_id="run",
            attempt=0,
            round=3,
            step=3,
            world_size=2,
            incidents=("i-1",),
            parts=tuple(PresentPart(rank, 0, str(bundle / f"rank-{rank:05d}")) for rank in ranks),
            missing=(),
            committed_at=2.0,
        )
        return replace(request, **changes)  # type: ignore[arg-type]

    return make
