"""A bundle as a replay needs it: one rank's batches, RNG states, weights and gradients as torch tensors.

Owns reading and the choice of whose weights to take. What was recorded is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from sentinel.bundle.manifest import (
    BATCHES_FILE,
    GRADIENTS_FILE,
    PARAMETERS_FILE,
    RNG_FILE,
    BatchEntry,
    Copies,
    PartHeader,
)
from sentinel.bundle.reader import Bundle, Part, TensorFile
from sentinel_agent.copies import fingerprint_of
from sentinel_agent.rng import RngState, from_tensors

_DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class Recording:
    """One rank's part of ``bundle``, with weights from another rank where its own were written too late."""

    def __init__(self, bundle: Bundle, rank: int) -> None:
        """Raises BundleRefused if there is no such part."""
        self.bundle = bundle
        self.part = bundle.part(rank)

    @property
    def header(self) -> PartHeader:
        """``part.json``."""
        return self.part.header

    @property
    def entries(self) -> tuple[BatchEntry, ...]:
        """Micro-batches of the round, in order."""
        return self.header.batches

    @cached_property
    def batches(self) -> dict[str, Tensor]:
        """Tensors of the micro-batches."""
        return read_tensors(self.part, BATCHES_FILE)

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """Gradients of this rank as they were before any reduction, as far as they were nonfinite."""
        return {name: g for name, g in read_tensors(self.part, GRADIENTS_FILE).items() if name in self._raw}

    @cached_property
    def rng(self) -> dict[str, RngState]:
        """``round`` (the end of the previous round) and ``b<i>`` (entry i) to the generators' states."""
        grouped: dict[str, dict[str, Tensor]] = {}
        for name, tensor in read_tensors(self.part, RNG_FILE).items():
            at, _, generator = name.partition(".")
            grouped.setdefault(at, {})[generator] = tensor
        return {at: from_tensors(tensors) for at, tensors in grouped.items()}

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers before the step, by name; empty if no rank's part has any that fit this one."""
        own = self._weights_of(self.part)
        if own and self.header.copies is not None:
            return {**self._copies(self.header.copies), **own}
        if self.header.copies is not None and not self.header.state_after_step:
            return self._copies(self.header.copies)
        if own:
            return own
        for rank in self.bundle.ranks:
            if rank != self.part.rank and (others := self._weights_of(self.bundle.part(rank))):
                return others
        return {}

    def _copies(self, wanted: Copies) -> dict[str, Tensor]:
        """The parameters that this rank left to others, from the first of those that has all of them."""
        for rank in wanted.ranks:
            others = self._weights_of(self.bundle.part(rank)) if rank in self.bundle.ranks else {}
            if all(name in others for name in wanted.names):
                return {name: others[name] for name in wanted.names}
        return {}

    @property
    def copies_differ(self) -> bool:
        """True if what this rank left to others to write is not what it had: its replica had drifted."""
        wanted = self.header.copies
        found = self._copies(wanted) if wanted is not None else {}
        return wanted is not None and bool(found) and fingerprint_of(found.items()) != wanted.fingerprint

    @property
    def weights_are_of_another_rank(self) -> bool:
        """True if this part was written after the step, so that a replica's weights must do."""
        return self.header.state_after_step and bool(self.weights)

    def shards(self, name: str) -> list[Tensor]:
        """The tensor of this name in every rank's part, in the order of ranks; empty if a rank's is missing."""
        found = []
        for rank in range(self.header.world_size):
            weights = self._weights_of(self.bundle.part(rank)) if rank in self.bundle.ranks else {}
            if name not in weights:
                return []
            found.append(weights[name])
        return found

    @property
    def _raw(self) -> frozenset[str]:
        return frozenset(self.header.raw_gradients)

    def _weights_of(self, part: Part) -> dict[str, Tensor]:
        if part.rank not in self._read:
            before = not part.header.state_after_step
            self._read[part.rank] = read_tensors(part, PARAMETERS_FILE) if before else {}
        return self._read[part.rank]

    @cached_property
    def _read(self) -> dict[int, dict[str, Tensor]]:
        return {}


def read_tensors(part: Part, file: str) -> dict[str, Tensor]:
    """Every tensor of a part's file, by name; empty if there is no such file. Raises BundleRefused."""
    source = part.tensors(file)
    return {} if source is None else {name: _read(source, name) for name in source.names}


def _read(source: TensorFile, name: str) -> Tensor:
    entry = source.entry(name)
    raw = bytearray(source.raw(name))
    if not raw:
        return torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    return torch.frombuffer(raw, dtype=torch.uint8).view(_DTYPES[entry.dtype]).reshape(entry.shape)


def flat_tensors(value: Any) -> list[Tensor]:
    """Every tensor in lists, tuples, dicts and dataclass-like objects, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for child in value for tensor in flat_tensors(child)]
    if isinstance(value, Mapping):
        return [tensor for child in value.values() for tensor in flat_tensors(child)]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, (type, torch.nn.Module)):
        return [tensor for child in attributes.values() if isinstance(child, Tensor) for tensor in flat_tensors(child)]
    return []
