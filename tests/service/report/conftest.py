"""A run directory as a job with an incident leaves it, with images, token ids and a replay in its bundle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import story
from safetensors.numpy import save_file

from sentinel.bundle.manifest import BATCHES_FILE
from sentinel.bundle.replayed import BadOp, OperandStatistics, ReplayRecord, replay_file
from sentinel.postmortem.report.facts import Facts, gather
from sentinel.wire.names import rank_directory

import past  # isort: skip

SCRIPT = "import torch\n\n\ndef normalise(x):\n    return (x - x.mean(1)) / x.std(1)\n"


def replay_record() -> ReplayRecord:
    """What replaying rank 1 found."""
    operand = OperandStatistics(dtype="float32", shape=(16, 1, 1, 1), zeros=1, minimum=0.0, maximum=6.1)
    result = OperandStatistics(dtype="float32", shape=(16, 1, 16, 16), nan=256, minimum=-1.0, maximum=2.0)
    bad = BadOp(
        op="aten.div.Tensor",
        kind="created",
        phase="forward",
        line="train.py:5",
        code="return (x - x.mean(1)) / x.std(1)",
        inputs=(operand,),
        outputs=(result,),
        rows=(5,),
        batch_size=16,
        stack=("train.py:5 in normalise", "train.py:9 in main"),
    )
    return ReplayRecord(
        bundle=story.BUNDLE,
        rank=1,
        round=7,
        step=7,
        reproduced=True,
        precision={"same": "nonfinite", "fp32": "nonfinite", "bf16": "not_run"},
        first_bad_op=bad,
        samples=(5,),
        samples_confirmed=True,
        cause="data",
        verdict="data_and_formula",
        reason="a constant image divides by zero in every precision",
        evidence=("reproduced twice, bit by bit",),
        refuted_by=("a finite result in fp32",),
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The story's run directory, its script beside it, tensors that look like something, and a replay record."""
    directory = story.write_database(tmp_path / "run", story.incident())
    (tmp_path / "train.py").write_text(SCRIPT)
    bundle = story.write_bundle(directory)
    for rank in (0, 1):
        place = bundle / rank_directory(rank)
        images = np.random.default_rng(rank).normal(size=(16, 1, 16, 16)).astype(np.float32)
        images[5] = 7.0
        save_file({"b0.image": images}, place / BATCHES_FILE)
        header = json.loads((place / "part.json").read_text())
        header["environment"]["cwd"] = str(tmp_path)
        (place / "part.json").write_text(json.dumps(header))
    (bundle / replay_file(1)).write_text(replay_record().model_dump_json())
    return directory


@pytest.fixture
def facts(run_dir: Path) -> Facts:
    """Everything about the story's incident."""
    incident = story.incident()
    assert incident.bundle
    return gather(incident, run_dir / incident.bundle, run_dir, past.log())
