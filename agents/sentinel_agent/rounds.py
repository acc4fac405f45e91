"""One round as this rank sees it, while it is open.

Owns the state between two closings: collectives, evidence, losses. Sends nothing and decides nothing; ``ledger.py`` does.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from sentinel.wire.messages import Check, Role


@dataclass(slots=True, eq=False)
class Reduction:
    """A collective that this rank has issued and that is being checked. ``outputs`` are held until they are."""

    op: str
    group: str
    ranks: tuple[int, ...]
    index: int
    reduce_op: str
    dtype: str
    role: Role
    wire: Check
    outputs: list[torch.Tensor] = field(default_factory=list)
    work: Any = None
    reduced: Check | None = None
    raw: Check | None = None
    narrowed: bool = False
    parameters: tuple[str, ...] = ()
    parameters_total: int = 0


@dataclass(slots=True)
class Round:
    """The open round. ``dirty``: something happened that a step would apply; ``synced``: gradients were reduced."""

    number: int
    dirty: bool = False
    synced: bool = False
    backward_ended: bool = False
    loss: float | None = None
    loss_nonfinite: bool = False
    gradient_nonfinite: bool = False
    derived_nonfinite: bool = False
    evidence: int = 0
    fingerprint: int = 0
    identity: int = 0
    reduced_storages: set[int] = field(default_factory=set)
    indices: Counter[str] = field(default_factory=Counter)
    checked_before: int = 0
    seconds_before: float = 0.0

    def next_index(self, group: str) -> int:
        """Number of the next checked collective of ``group`` in this round."""
        self.indices[group] += 1
        return self.indices[group] - 1

    @property
    def suspicious(self) -> bool:
        """True if anything nonfinite was latched."""
        return self.evidence > 0

    def identify(self, reduction: Reduction) -> None:
        """Add a gradient collective to the round's identity: op, dtype, size and order, equal on all ranks of a group."""
        text = f"{reduction.op}|{reduction.dtype}|{reduction.wire.numel}|{reduction.index}"
        self.identity = zlib.crc32(text.encode(), self.identity)

    def fingerprint_result(self, finding: Check) -> None:
        """Add what a gradient all-reduce returned. The largest magnitude is free: the check has just computed it."""
        self.fingerprint = zlib.crc32(repr((finding.absmax, finding.nan, finding.inf)).encode(), self.fingerprint)
