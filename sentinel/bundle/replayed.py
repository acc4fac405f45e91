"""What a replay of a bundle is asked for, and what it found: ``bundles/<id>/replay-rank-NNNNN.json``, beside the parts.

Owns names and schema of request, outcome of a trial, and record. The record is no part of the committed bundle: it is written
later, by whoever replays, and may be written again. How a verdict is reached is in ``sentinel_agent/replay/verdict.py``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Precision = Literal["same", "fp32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = ("same", "fp32", "bf16", "fp16")
Cause = Literal["data", "numerics", "optimization", "communication", "hardware", "framework", "unknown"]
Found = Literal["nonfinite", "finite", "damaged_state", "not_run", "failed"]
"""``damaged_state``: nonfinite, but only since a recorded parameter or buffer already was."""
Kind = Literal["created", "constant", "escalated", "arrived"]
"""How a nonfinite value came in: made by an op from finite inputs; a constant the user wrote; NaN made of such constants; or it
was there already when the step began (a batch, a parameter, a buffer)."""

_FILE = re.compile(r"replay-rank-\d{5,7}\.json", re.ASCII)


def replay_file(rank: int) -> str:
    """Name of a rank's replay record inside a bundle."""
    return f"replay-rank-{rank:05d}.json"


def is_replay_file(name: str) -> bool:
    """True for a name that a replay record may have."""
    return _FILE.fullmatch(name) is not None


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class OperandStatistics(_Record):
    """One input or output of an op: counts of what is nonfinite, and the range of the rest."""

    dtype: str
    shape: tuple[int, ...]
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0
    minimum: float | None = None
    maximum: float | None = None
    absmin: float | None = Field(default=None, description="smallest magnitude that is not zero")
    trained: bool = Field(default=False, description="it depends on parameters that are trained")


class BadOp(_Record):
    """The op where a nonfinite value came in that reached the loss or a gradient.

    ``line`` is ``file.py:12`` and ``code`` that line's text; in backward both are of the forward that the node belongs to, unless
    the backward is the user's own code. ``what`` names the tensor that arrived nonfinite. ``rows`` are indices along dimension 0.
    """

    op: str
    kind: Kind
    phase: Literal["forward", "backward", "reduction", "optimizer"]
    module: str | None = None
    line: str | None = None
    file: str | None = None
    code: str | None = None
    stack: tuple[str, ...] = ()
    node: str | None = None
    what: str | None = None
    inputs: tuple[OperandStatistics, ...] = ()
    outputs: tuple[OperandStatistics, ...] = ()
    rows: tuple[int, ...] | None = None
    batch_size: int | None = None


class GradientComparison(_Record):
    """A recorded gradient against the recomputed one: elements of all, and how many differ in any bit."""

    name: str
    elements: int
    different: int


class TrialOutcome(_Record):
    """What one run of the user's script did. ``status`` other than ``replayed`` says in ``reason`` why there is no result.

    ``inputs``: ``equal`` the script made the recorded forward inputs again, bit by bit; ``substituted`` it did not, so they were
    put in; ``fed`` a DataLoader was answered with the recorded batches.
    """

    status: Literal["replayed", "script_raised", "not_reached", "timed_out", "crashed"]
    reason: str = ""
    precision: Precision = "same"
    nonfinite: bool = False
    sink: str = Field(
        default="", description="what was nonfinite first: loss, gradient NAME, wire, final gradient NAME"
    )
    loss: float | None = None
    loss_equal: bool | None = None
    nonfinite_gradients: tuple[str, ...] = ()
    gradients: tuple[GradientComparison, ...] = ()
    first_bad_op: BadOp | None = None
    other_ops: tuple[BadOp, ...] = ()
    inputs: Literal["equal", "substituted", "fed", "unseen"] = "unseen"
    low_precision: bool = Field(default=False, description="the script used float16 or bfloat16 somewhere")
    batch_size: int | None = None
    ops: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    stopped_at: str = ""
    diverted: tuple[str, ...] = ()
    gradient_hash: str = ""
    anomaly: str = ""
    notes: tuple[str, ...] = ()


class BatchFinding(_Record):
    """Something odd in the recorded batch, and whether innocent ranks' batches show it too."""

    tensor: str
    what: str
    samples: tuple[int, ...] = ()
    detail: str
    elsewhere: bool = False


class ReplayRequest(_Record):
    """One replay: which bundle and rank, how, and the limits of one trial (seconds)."""

    bundle: str
    rank: int | None = None
    precisions: tuple[Precision, ...] = PRECISIONS[:3]
    samples: bool = True
    anomaly: bool = False
    entry: str | None = None
    script: str | None = None
    timeout: float = 300.0


class ReplayRecord(_Record):
    """What a replay found: the contract of ``sentinel replay -o json``."""

    schema_version: Literal[1] = 1
    bundle: str
    rank: int
    round: int
    step: int
    reproduced: bool
    precision: dict[Precision, Found]
    first_bad_op: BadOp | None
    samples: tuple[int, ...]
    samples_confirmed: bool | None = Field(default=None, description="None where they were not put to the test")
    cause: Cause
    verdict: str = Field(description="named reason of the verdict")
    reason: str
    evidence: tuple[str, ...] = ()
    refuted_by: tuple[str, ...] = ()
    lint: tuple[Any, ...] = ()
    batch: tuple[BatchFinding, ...] = ()
    trials: tuple[TrialOutcome, ...] = ()
    diverted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    replayed_at: float = 0.0


def write_record(bundle: Path, record: ReplayRecord) -> Path:
    """Put the record beside the parts, whole or not at all. Raises OSError."""
    path = bundle / replay_file(record.rank)
    tmp = path.with_name(f".{path.name}.{os.getpid()}")
    tmp.write_text(record.model_dump_json(indent=1))
    tmp.replace(path)
    return path
