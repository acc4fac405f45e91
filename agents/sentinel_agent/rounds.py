"""One round as this rank sees it, while it is open.

Owns the state between two closings: collectives, evidence, losses. Sends nothing and decides nothing; ``ledger.py`` does.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from sentinel.wire.messages import Check, Role
from sentinel_agent.raw import RawGradients


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
    sum_in: float | None = None  # taken where the result will be audited
    reduced: Check | None = None
    turn: int = 0  # decides in which rounds its sums are compared
    sharded: bool = False  # issued by FSDP
    steady: bool = True  # nobody can write the result before it has been looked at
    raw: Check | None = None
    narrowed: bool = False
    parameters: tuple[str, ...] = ()
    parameters_total: int = 0
    versions: tuple[int, ...] = ()  # of an asynchronous all-reduce's outputs as it was issued: the op changes none
    given_away: bool = False  # a loop's own gradients, that goes on without waiting
    late: bool = False  # the result was written before it could be looked at
    chained: bool = False  # issued by what a communication hook does with the result of an earlier one
    names: tuple[str, ...] | None = None  # the parameters whose gradients it is known to carry


@dataclass(frozen=True, slots=True)
class Received:
    """A tensor that a point-to-point receive writes, and how to know that it has been, and by nobody since."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    work: Any
    move: Reduction


@dataclass(slots=True)
class Round:
    """The open round. ``dirty``: something happened that a step would apply; ``synced``: gradients were reduced."""

    number: int
    dirty: bool = False
    synced: bool = False
    backward_ended: bool = False
    backward_thread: int = 0  # ident of the thread whose backward is running, 0 if none
    forwards: int = 0
    first_node: int = 0  # autograd's number, on this thread, of the next node as the first forward began
    between: bool = False  # a backward has ended, and neither a forward nor a backward has begun since
    loss: float | None = None
    loss_scale: float | None = None
    loss_nonfinite: bool = False
    gradient_nonfinite: bool = False
    shared_nonfinite: bool = False  # so is a gradient that all ranks know to be: what the guard decides by
    private: bool = False  # some gradient was reduced in a way that not all ranks share
    derived_nonfinite: bool = False
    spoilt: bool = False  # gradients were finite when they were reduced, and not when they were to be applied
    suspect: bool = False  # this rank saw something that no collective brought it
    infinite: bool = False  # some gradient evidence had infinities, as overflow makes them
    evidence: int = 0
    averaged: bool = False  # values were exchanged since the last step, before any forward: weights may be equal since
    echoes: bool = False  # it begins with parameters known to be nonfinite
    given: list[Reduction] = field(default_factory=list)  # gatherings that were given NaN, not told yet
    received: list[Received] = field(default_factory=list)  # not looked at yet
    carried: bool = False  # something that may hold gradients was reduced or handed round after the backward
    looked: bool = False  # at gradients that no collective carried
    backwards: int = 0
    reducing: bool = False  # the backward that runs, or ran last, has reduced gradients
    syncs: int = 0  # backwards that did
    activations: int = 0
    gradient_absmax: float | None = None
    float16_absmax: float | None = None
    reduced_storages: set[int] = field(default_factory=set)
    raw_gradients: RawGradients = field(default_factory=RawGradients)
    buckets: int = 0  # collectives that came straight from the engine
    indices: Counter[str] = field(default_factory=Counter)
    checked_before: int = 0
    seconds_before: float = 0.0  # the stopwatch's reading when the round began

    def forward_begins(self) -> None:
        """An outermost forward begins: what is reduced from here on is not of the gradients that are there."""
        self.between = False
        if not self.forwards:
            self.first_node = torch._C._autograd._get_sequence_nr()
        self.forwards += 1

    def backward_elsewhere(self) -> bool:
        """Is a backward running on another thread? Callbacks of a communication hook issue collectives from gloo's threads."""
        return self.backward_thread not in (0, threading.get_ident())

    def next_index(self, group: str) -> int:
        """Number of the next checked collective of ``group`` in this round."""
        self.indices[group] += 1
        return self.indices[group] - 1

    def weigh(self, found: Check, dtype: str) -> None:
        """Take in what a gradient collective was given."""
        self.gradient_absmax = max(self.gradient_absmax or 0.0, found.absmax)
        if dtype == "float16":
            self.float16_absmax = max(self.float16_absmax or 0.0, found.absmax)

    @property
    def suspicious(self) -> bool:
        """True if anything nonfinite was latched."""
        return self.evidence > 0
