"""What an incident is: its closed vocabularies and its JSON form (the contract other programs read).

Owns names and shapes. Which verdict is right is decided in ``classify.py``; when an incident opens, updates and resolves, in
``tracker.py``.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict

from sentinel.wire.messages import Guarded

SCHEMA_VERSION = 1


class Kind(StrEnum):
    """Kind of fault; the label values of ``sentinel_incidents_total`` and the sections of deploy/RUNBOOK.md."""

    NONFINITE_GRADIENT = "nonfinite_gradient"
    NONFINITE_LOSS = "nonfinite_loss"
    NONFINITE_PARAMETERS = "nonfinite_parameters"
    NONFINITE_BUFFERS = "nonfinite_buffers"
    BAD_REDUCTION = "bad_reduction"
    REPLICA_DIVERGENCE = "replica_divergence"
    STEP_DISAGREEMENT = "step_disagreement"
    SCALER_COLLAPSE = "scaler_collapse"
    STALLED_TRAINING = "stalled_training"
    SILENT_OVERFLOW = "silent_overflow"
    MISUSE = "misuse"
    RANK_SILENT = "rank_silent"


class Stage(StrEnum):
    """Where the first nonfinite (or wrong) value is born."""

    INIT_WEIGHTS = "init_weights"
    PARAMS = "params"
    FORWARD = "forward"
    PRE_REDUCE = "pre_reduce"
    WIRE_CAST = "wire_cast"
    BETWEEN_COLLECTIVES = "between_collectives"
    POST_REDUCE = "post_reduce"
    NOT_REDUCED = "not_reduced"
    OPTIMIZER = "optimizer"
    NONE = "none"  # no value is wrong: rank_silent


class Attribution(StrEnum):
    """Whose fault it is. ``none`` where no rank can be told (or the kind has no rank)."""

    RANK_LOCAL = "rank_local"
    MULTI_RANK = "multi_rank"
    ALL_RANKS = "all_ranks"
    REDUCTION_INDUCED = "reduction_induced"
    NONE = "none"


class Severity(StrEnum):
    """critical: weights are or would be damaged. warning: look at it. info: for the record."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


class Cause(StrEnum):
    """The rule's best reading at first; settled by replay."""

    DATA = "data"
    NUMERICS = "numerics"
    OPTIMIZATION = "optimization"
    COMMUNICATION = "communication"
    HARDWARE = "hardware"
    FRAMEWORK = "framework"
    UNKNOWN = "unknown"


class State(StrEnum):
    """open: seen. updated: seen again, or its evidence grew. resolved: enough healthy rounds since."""

    OPEN = "open"
    UPDATED = "updated"
    RESOLVED = "resolved"


class _Record(BaseModel):
    """Base of everything at rest: strict about unknown fields, and NaN stays NaN in JSON (as a string)."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class RankFinding(_Record):
    """What one rank saw of the fault, kept with the incident as its evidence."""

    rank: int
    phase: str
    op: str | None = None
    group: str | None = None
    index: int | None = None
    dtype: str | None = None
    numel: int = 0
    nan: int = 0
    inf: int = 0
    absmax: float = 0.0
    wire_absmax: float | None = None
    loss: float | None = None
    parameters: tuple[str, ...] = ()
    parameters_total: int = 0
    note: str = ""


class Verdict(_Record):
    """A rule's decision: kind + stage + attribution + suspect_ranks + reason. ``rule`` names the rule of classify.py."""

    rule: str
    kind: Kind
    stage: Stage
    attribution: Attribution
    suspect_ranks: tuple[int, ...]
    severity: Severity
    cause: Cause
    reason: str
    parameters: tuple[str, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    findings: tuple[RankFinding, ...] = ()


class FirstBadOp(_Record):
    """The operation that made the first nonfinite value, as replay found it."""

    op: str
    phase: str
    module: str | None = None
    line: str | None = None


class Incident(_Record):
    """One fault of a run. ``step`` and ``round`` date its origin, ``opened_at`` its detection (RFC 3339, UTC).

    ``guard`` is what was done about the step of the round it was seen in first.
    """

    id: str
    run_id: str
    kind: Kind
    severity: Severity
    step: int
    round: int
    attempt: int
    stage: Stage
    attribution: Attribution
    suspect_ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    cause: Cause
    reason: str
    first_bad_op: FirstBadOp | None = None
    bundle: str | None = None
    opened_at: datetime
    updated_at: datetime
    state: State
    rule: str = ""
    world_size: int = 0
    occurrences: int = 1
    last_round: int = 0
    guard: Guarded = Guarded.NO
    acknowledged_at: datetime | None = None
    acknowledged_by: str = ""
    acknowledged_note: str = ""
    missing_ranks: tuple[int, ...] = ()
    findings: tuple[RankFinding, ...] = ()


class IncidentList(_Record):
    """What ``sentinel incidents ls -o json`` prints and ``/api/v1/incidents`` serves."""

    schema_version: Literal[1] = 1
    run_id: str | None
    incidents: tuple[Incident, ...]


def utc(seconds: float) -> datetime:
    """Unix seconds as an aware UTC time."""
    return datetime.fromtimestamp(seconds, tz=UTC)
