"""Writes this rank's part of a bundle: whole or not at all.

Owns the part's directory and what goes into it, within a budget of bytes. The format is ``sentinel/bundle/manifest.py``;
when to dump and what to hand over is the caller's. A part that cannot be written is a result with an error, no exception.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from sentinel.bundle.manifest import (
    BATCHES_FILE,
    GRADIENTS_FILE,
    OPTIMIZER_FILE,
    PARAMETERS_FILE,
    PART_FILE,
    RNG_FILE,
    LayerNorms,
    PartHeader,
    TensorStatistics,
)
from sentinel.bundle.paths import flush_directory
from sentinel.wire.names import BUNDLES, bundle_id, rank_directory
from sentinel_agent.batchdump import BatchDump
from sentinel_agent.beside import beside
from sentinel_agent.contents import local
from sentinel_agent.copies import described
from sentinel_agent.environment import environment
from sentinel_agent.optimizerdump import OptimizerDump
from sentinel_agent.redaction import Redaction
from sentinel_agent.rng import as_tensors
from sentinel_agent.shards import shard_of
from sentinel_agent.statistics import tensor_statistics
from sentinel_agent.tensorfile import Names, flush_to_disk, new_file, storable, write_tensors
from sentinel_agent.window import Entry

DISK_SHARE: Final = 0.2  # of what is free where the run directory lies, at most
NamedTensors = list[tuple[str, Tensor]]

# What reading tensors and writing files can raise; anything else is a mistake of ours and the agent's guard must see it.
_FAILURES: Final = (OSError, RuntimeError, ValueError, TypeError, MemoryError)
_writing = threading.Lock()  # a judge and a request of the coordinator may name the same round at once


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRequest:
    """All that goes into a part. ``level`` stats writes no tensors, full also optimizer state; ``byte_cap`` bounds tensors.

    ``entries`` come from ``Window.entries``; ``redaction`` is asked what of them may be written. ``start_buffers`` are buffers as
    they were when the round began, which is what is written for those that have one; statistics are of ``named_buffers``.
    ``raw_gradients`` names those of ``nonfinite_gradients`` that were cloned before any reduction; statistics are also taken of
    every gradient that ``named_parameters`` still have. ``left_to_others`` names parameters whose contents other ranks write.
    """

    run_dir: Path
    run_id: str
    attempt: int
    rank: int
    world_size: int
    node: int
    round: int
    step: int
    state_after_step: bool
    reason: str
    loss: float | None = None
    loss_scale: float | None = None
    level: Literal["stats", "batch", "full"] = "batch"
    entries: tuple[Entry, ...] = ()
    named_parameters: NamedTensors = field(default_factory=list)
    named_buffers: NamedTensors = field(default_factory=list)
    start_buffers: NamedTensors = field(default_factory=list)
    nonfinite_gradients: NamedTensors = field(default_factory=list)
    raw_gradients: tuple[str, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    scaler: dict[str, float] | None = None
    byte_cap: int = 10 << 30
    left_to_others: frozenset[str] = frozenset()
    redaction: Redaction = field(default_factory=Redaction)
    layer_norms: LayerNorms | None = None


@dataclass(frozen=True, slots=True)
class PartResult:
    """What became of a part: its absolute directory, bytes on disk, seconds it took, and one line of error or ''."""

    directory: str
    bytes: int
    seconds: float
    error: str = ""


def part_directory(run_dir: Path, attempt: int, round_: int, rank: int) -> Path:
    """Where a rank's part lies, absolute; every process derives it alone."""
    return run_dir.absolute() / BUNDLES / bundle_id(attempt, round_) / rank_directory(rank)


def write_part(request: PartRequest) -> PartResult:
    """Write the part, or return the one that is there already. Never raises; on failure nothing is left behind."""
    began = time.perf_counter()
    final = part_directory(request.run_dir, request.attempt, request.round, request.rank)
    error = ""
    size = 0
    with _writing:
        try:
            if not final.exists():
                _write_new(request, final)
            size = sum(entry.stat().st_size for entry in os.scandir(final))
        except _FAILURES as failure:
            error = _one_line(failure)
    return PartResult(str(final), size, time.perf_counter() - began, error)


def _write_new(request: PartRequest, final: Path) -> None:
    bundle = final.parent
    for directory in (bundle.parent, bundle):
        directory.mkdir(mode=0o700, exist_ok=True)
    tmp = bundle / f".{final.name}.tmp-{os.getpid()}"
    shutil.rmtree(tmp, ignore_errors=True)  # of a process that had this pid and died while writing
    tmp.mkdir(mode=0o700)
    try:
        _fill(tmp, request)
        flush_directory(tmp)
        tmp.rename(final)
        flush_directory(bundle)
        flush_directory(bundle.parent)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _fill(tmp: Path, request: PartRequest) -> None:
    """Write the files. Batches come before gradients before parameters where the budget is short; part.json is last."""
    budget = _Budget(min(request.byte_cap, int(DISK_SHARE * shutil.disk_usage(tmp).free)))
    keep = request.level != "stats"
    statistics = _statistics_of(request)
    batches = BatchDump(request.entries, budget.take if keep else _keep_none, request.redaction)
    notes: list[str] = []
    if keep:
        _write_rng(tmp, request.entries)
        if batches.tensors:
            write_tensors(tmp / BATCHES_FILE, batches.tensors)
        notes += _write_gradients(tmp, request.nonfinite_gradients, budget)
        notes += _write_state(tmp, _own_state(request), budget)
    names = {id(parameter): name for name, parameter in request.named_parameters}
    optimizers = OptimizerDump(request.optimizers if request.level == "full" else (), names, request.left_to_others)
    notes += _write_optimizers(tmp, optimizers.tensors, budget)
    header = _header(request, batches, notes, optimizers, statistics())
    with new_file(tmp / PART_FILE) as out:
        out.write(header.model_dump_json(indent=1).encode())
        flush_to_disk(out)


Statistics = tuple[TensorStatistics, ...]


def _statistics_of(request: PartRequest) -> Callable[[], tuple[Statistics, Statistics]]:
    """Statistics of the parameters and of the gradients, taken while the tensors are written.

    Not where a tensor is of a class that runs Python when it is read (FakeTensor and others): its state is not for two threads.
    """
    state, gradients = [*request.named_parameters, *request.named_buffers], _gradients(request)

    def take() -> tuple[Statistics, Statistics]:
        return _statistics(state), _statistics(gradients)

    plain = all(type(local(tensor)) in (Tensor, torch.nn.Parameter) for _, tensor in [*state, *gradients])
    return beside(take) if plain else take


def _header(
    request: PartRequest,
    batches: BatchDump,
    notes: list[str],
    optimizers: OptimizerDump,
    statistics: tuple[Statistics, Statistics],
) -> PartHeader:
    return PartHeader(
        run_id=request.run_id,
        attempt=request.attempt,
        rank=request.rank,
        world_size=request.world_size,
        node=request.node,
        round=request.round,
        step=request.step,
        state_after_step=request.state_after_step,
        reason="; ".join([request.reason, *notes]),
        written_at=time.time(),
        loss=request.loss,
        loss_scale=request.loss_scale,
        batches=batches.described(request.round),
        batch_statistics=batches.statistics(),
        sample_findings=batches.findings(),
        parameter_statistics=statistics[0],
        gradient_statistics=statistics[1],
        environment=environment(),
        raw_gradients=request.raw_gradients,
        layer_norms=request.layer_norms,
        optimizers=tuple(optimizers.described),
        scaler=request.scaler,
        copies=described(request.world_size, _left_out(request)) if request.level != "stats" else None,
        shards={name: shard for name, tensor in _named(request) if (shard := shard_of(tensor)) is not None},
    )


def _named(request: PartRequest) -> NamedTensors:
    """Parameters and buffers under the names they are written with."""
    names = Names()
    return [(names.take(name), tensor) for name, tensor in [*request.named_parameters, *_buffers(request)]]


def _own_state(request: PartRequest) -> NamedTensors:
    """Parameters and buffers, less those that other ranks write."""
    kept = [(name, p) for name, p in request.named_parameters if name not in request.left_to_others]
    return [*kept, *_buffers(request)]


def _left_out(request: PartRequest) -> NamedTensors:
    return [(name, p) for name, p in request.named_parameters if name in request.left_to_others]


def _write_rng(tmp: Path, entries: tuple[Entry, ...]) -> None:
    """``round.<generator>`` at the end of the previous round, ``b<i>.<generator>`` at each entry."""
    states = [(f"b{index}", entry.rng) for index, entry in enumerate(entries)]
    if entries:
        states.insert(0, ("round", entries[0].round_rng))
        named = [(f"{at}.{name}", tensor) for at, state in states for name, tensor in as_tensors(state).items()]
        write_tensors(tmp / RNG_FILE, named)


def _write_gradients(tmp: Path, gradients: NamedTensors, budget: _Budget) -> list[str]:
    kept: NamedTensors = []
    for name, tensor in _unique(gradients):
        if storable(tensor) and budget.take(tensor.nbytes):
            kept.append((name, tensor))
    if kept:
        write_tensors(tmp / GRADIENTS_FILE, kept)
    left_out = len(gradients) - len(kept)
    return [f"{left_out} of {len(gradients)} gradients left out"] if left_out else []


def _write_state(tmp: Path, tensors: NamedTensors, budget: _Budget) -> list[str]:
    """Parameters and buffers, all or none: a replay can do nothing with some of them."""
    named = _unique(tensors)
    strange = [name for name, tensor in named if not storable(tensor)]
    size = sum(tensor.nbytes for _, tensor in named)
    if strange:
        return [f"parameters left out: {strange[0]} has a dtype, a layout or a storage that cannot be written"]
    if not budget.take(size):
        return [f"parameters left out: {size} bytes are over the budget"]
    if named:
        write_tensors(tmp / PARAMETERS_FILE, named)
    return []


def _write_optimizers(tmp: Path, tensors: NamedTensors, budget: _Budget) -> list[str]:
    """All or none, as with parameters: half of an optimizer is none."""
    named = _unique(tensors)
    size = sum(tensor.nbytes for _, tensor in named)
    if not all(storable(tensor) for _, tensor in named):
        return ["optimizer state left out: a dtype, a layout or a storage that cannot be written"]
    if not budget.take(size):
        return [f"optimizer state left out: {size} bytes are over the budget"]
    if named:
        write_tensors(tmp / OPTIMIZER_FILE, named)
    return []


def _buffers(request: PartRequest) -> NamedTensors:
    """Buffers as a replay needs them: from the round's start where they were copied then."""
    started = dict(request.start_buffers)
    return [(name, _started(started, name, tensor)) for name, tensor in request.named_buffers]


def _started(started: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    copy = started.get(name)
    return copy if copy is not None and copy.shape == local(tensor).shape else tensor


def _unique(tensors: NamedTensors) -> NamedTensors:
    names = Names()
    return [(names.take(name), local(tensor).detach()) for name, tensor in tensors]


def _gradients(request: PartRequest) -> NamedTensors:
    """The gradients found nonfinite as they were, and what every other parameter's gradient is now."""
    found = dict(request.nonfinite_gradients)
    for name, parameter in request.named_parameters:
        # .grad of a non-leaf warns; a flat shard's views are such, and have none.
        gradient = parameter.grad if parameter.is_leaf else None
        if gradient is not None:
            found.setdefault(name, gradient)
    return list(found.items())


def _statistics(tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorStatistics, ...]:
    return tuple(tensor_statistics(name, tensor) for name, tensor in tensors)


class _Budget:
    """Bytes that tensors may still take."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, size: int) -> bool:
        """True, and the bytes are spent, if ``size`` fits."""
        if size > self._left:
            return False
        self._left -= size
        return True


def _keep_none(_size: int) -> bool:
    return False


def _one_line(failure: BaseException) -> str:
    if isinstance(failure, OSError) and failure.errno is not None:
        code = errno.errorcode.get(failure.errno, str(failure.errno))
        where = f": {failure.filename}" if failure.filename else ""
        return f"{failure.strerror} ({code}){where}"
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text}"[:300]
