"""The bundle on disk: one directory per dumped round, one part per rank, and a manifest written last.

Owns names, schema and version of the format. Reading and checking is in ``reader.py``; committing in ``commit.py``; ranks write
their parts with ``sentinel_agent/dump.py``.

    bundles/a0-r000003/manifest.json            last; lists every file with its sha256, or says what is missing
    bundles/a0-r000003/rank-00001/part.json     this rank's structure: PartHeader
    bundles/a0-r000003/rank-00001/batches.safetensors     tensors of the window's micro-batches, named b<i>.<path>
    bundles/a0-r000003/rank-00001/parameters.safetensors  parameters and buffers before the step, by qualified name
    bundles/a0-r000003/rank-00001/rng.safetensors         RNG states at each micro-batch, named b<i>.<generator>
    bundles/a0-r000003/rank-00001/gradients.safetensors   gradients found nonfinite on this rank, by qualified name
    bundles/a0-r000003/rank-00001/optimizer.safetensors   optimizer state before the step, named o<i>.<parameter>.<key>; level full
    bundles/a0-r000003/replay-rank-00001.json             not of the bundle: what a replay found (``replayed.py``)
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FORMAT_VERSION = 1
PART_FILE = "part.json"
BATCHES_FILE = "batches.safetensors"
PARAMETERS_FILE = "parameters.safetensors"
RNG_FILE = "rng.safetensors"
GRADIENTS_FILE = "gradients.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class TensorStatistics(_Record):
    """Statistics of one tensor; ``absmax``, ``minimum``, ``maximum``, ``mean`` and ``std`` are over its finite elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nan: int = 0
    inf: int = 0
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    std: float | None = None


class SampleFinding(_Record):
    """Something odd about one sample (row along dim 0) of a batch tensor: ``what`` is one of the names below."""

    tensor: str
    sample: int
    what: Literal["nan", "inf", "constant"]
    detail: str


class BatchEntry(_Record):
    """One micro-batch of the window. ``structure`` mirrors the user's nesting; tensors appear as {"tensor": name}.

    ``source`` is where it was caught: the DataLoader, or the root module's inputs. ``mutated`` names tensors that the user
    changed in place after they were caught (their contents are then later than the forward).
    """

    index: int
    round: int
    source: Literal["loader", "forward"]
    structure: Any
    sample_indices: tuple[int, ...] | None = None
    mutated: tuple[str, ...] = ()
    omitted: tuple[str, ...] = Field(default=(), description="tensors left out, with the reason after a colon")


class Environment(_Record):
    """Where it ran: enough to start it again."""

    argv: tuple[str, ...]
    cwd: str
    python: str
    torch: str
    host: str
    pid: int
    git_commit: str | None = None
    variables: dict[str, str] = Field(default_factory=dict, description="redacted: only names known to be harmless")
    module: str | None = Field(default=None, description="package.module if it was started with python -m")


class OptimizerGroup(_Record):
    """One ``param_groups`` entry: its options as JSON, what has no JSON form by its type's name."""

    options: dict[str, Any]
    parameters: tuple[str, ...]


class OptimizerState(_Record):
    """One optimizer. Its tensors are in the optimizer file under ``o<index>.``; ``scalars`` are numbers of parameters' states."""

    index: int
    type: str
    groups: tuple[OptimizerGroup, ...]
    scalars: dict[str, dict[str, bool | int | float | str | None]] = Field(default_factory=dict)
    omitted: tuple[str, ...] = ()


class Shard(_Record):
    """Where a rank's part of a split tensor lies: the shape of the whole, and the place of the part's first element in it."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


class Copies(_Record):
    """Parameters that a part leaves to ``ranks``, which write the same; ``fingerprint`` is of what this rank had."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    fingerprint: str


class LayerNorms(_Record):
    """L2 norms of the gradients of this rank's last rounds, by layer: one for each of ``rounds``, None where there is none.

    Divided by the loss scale. Of reduced gradients where an all-reduce brought them, of a rank's own where FSDP shards them.
    """

    rounds: tuple[int, ...]
    layers: dict[str, tuple[float | None, ...]]


class PartHeader(_Record):
    """``part.json``: structure and statistics of one rank's part."""

    format_version: Literal[1] = 1
    run_id: str
    attempt: int
    rank: int
    world_size: int
    node: int
    round: int
    step: int
    state_after_step: bool = Field(description="True if parameters were written after the optimizer had stepped")
    reason: str
    written_at: float
    loss: float | None = None
    loss_scale: float | None = None
    batches: tuple[BatchEntry, ...] = ()
    batch_statistics: tuple[TensorStatistics, ...] = ()
    sample_findings: tuple[SampleFinding, ...] = ()
    parameter_statistics: tuple[TensorStatistics, ...] = ()
    gradient_statistics: tuple[TensorStatistics, ...] = ()
    environment: Environment
    optimizers: tuple[OptimizerState, ...] = ()
    shards: dict[str, Shard] = Field(
        default_factory=dict, description="of parameters that are split over ranks, by name"
    )
    copies: Copies | None = Field(default=None, description="of replicated parameters that other ranks' parts hold")
    scaler: dict[str, float] | None = Field(default=None, description="state of the GradScaler that scaled the loss")
    layer_norms: LayerNorms | None = None
    raw_gradients: tuple[str, ...] = Field(
        default=(), description="names in the gradients file that were cloned before any reduction wrote them"
    )


class FileEntry(_Record):
    """One file of the bundle, path relative to the bundle's directory."""

    path: str
    bytes: int
    sha256: str


class PartEntry(_Record):
    """One rank's part as the coordinator knows it. ``remote`` parts lie on another host's run directory."""

    rank: int
    node: int
    directory: str
    complete: bool
    error: str = ""
    remote: bool = False


class Manifest(_Record):
    """``manifest.json``. ``complete`` only if every rank's part is here and whole; else ``missing_ranks`` says whose is not."""

    format_version: Literal[1] = 1
    id: str
    run_id: str
    attempt: int
    round: int
    step: int
    world_size: int
    incidents: tuple[str, ...]
    complete: bool
    missing_ranks: tuple[int, ...] = ()
    parts: tuple[PartEntry, ...]
    files: tuple[FileEntry, ...]
    committed_at: float
    sha256: str = Field(
        default="", description="of this file, with 64 zeros in the place of this digest; last in the file"
    )
