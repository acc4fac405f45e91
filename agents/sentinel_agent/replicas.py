"""Which parameters are reduced over which group, and fingerprints of both sides: what came back, and the weights themselves.

Owns the bookkeeping that tells a parameter nobody reduces, and replicas that have drifted apart. Compares nothing: one rank cannot.
"""

from __future__ import annotations

import functools
import math
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from sentinel.wire.messages import UNREDUCED, GroupSync, Weights
from sentinel_agent.check import local_part
from sentinel_agent.fingerprint import Audit, crc_of, fingerprint, its_turn, word_sum
from sentinel_agent.rounds import Reduction

WEIGHTS_EVERY = 64
_NOT_AUDITED = Audit(-1, 0.0, 0.0, 0, 0.0, "", "")


def weights_due(number: int) -> bool:
    """Rounds whose starting weights are fingerprinted: 0, 1, 2, 4, 8, … and every 64th."""
    return number & (number - 1) == 0 or number % WEIGHTS_EVERY == 0


@dataclass(slots=True)
class _Group:
    """One process group's gradient collectives in the open round."""

    ranks: tuple[int, ...]
    size: int
    collectives: int = 0
    identity: int = 0
    fingerprint: int = 0
    squares: float = 0.0
    foreign: int = 0
    audited: Audit | None = None


@dataclass(slots=True)
class Replicas:
    """Replicated parameters by group, and this round's reductions of them."""

    world_size: int
    _replicas: dict[str, dict[str, weakref.ref[torch.Tensor]]] = field(default_factory=dict)
    _covering: set[str] = field(default_factory=set)  # groups of all ranks
    _groups: dict[str, _Group] = field(default_factory=dict)
    _announced: set[str] = field(default_factory=set)
    _reduced: set[str] = field(default_factory=set)
    _during: set[str] = field(default_factory=set)
    _noted: set[str] = field(default_factory=set)  # groups all of whose parameters are in both already
    _touched: set[str] = field(default_factory=set)
    _before: dict[str, tuple[int, int]] = field(default_factory=dict)
    _unseen_in_hook: set[str] = field(default_factory=set)  # groups whose results nobody could look at as they came
    _unseen: set[str] = field(default_factory=set)
    _all_during: bool = False
    _all_reduced: bool = False

    def replicate(self, group: str, size: int, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """These parameters are meant to be equal on all ``size`` ranks of ``group``: a DDP's, or those a loop all-reduces."""
        if size == self.world_size:
            self._covering.add(group)
        self._noted.discard(group)
        known = self._replicas.setdefault(group, {})
        known.update((name, weakref.ref(p)) for name, p in named if name not in known or known[name]() is None)

    def everywhere(self) -> set[str]:
        """Names of the parameters that are meant to be equal on all ranks of the job."""
        return {name for group in self._covering for name in self._replicas.get(group, {})}

    def backward_begins(self, gradients: Iterable[tuple[str, torch.Tensor]]) -> None:
        """A backward is about to add to some gradients. ``gradients`` (empty in rounds that need not know) are those there now."""
        self._during, self._all_during = set(), False
        self._noted.clear()
        self._before = {name: (id(gradient), gradient._version) for name, gradient in gradients}

    def backward_ended(self, gradients: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What the backward added to and nothing has reduced meanwhile is reduced no longer."""
        written = {name for name, g in gradients if self._before.get(name) != (id(g), g._version)}
        alone = set() if self._all_during else written - self._during
        if alone and self._all_reduced:  # what was reduced without names were the gradients that were there then
            self._reduced |= self._touched
            self._all_reduced = False
        self._reduced -= alone
        self._touched |= written
        self._all_during = False

    def issued(
        self, reduction: Reduction, names: tuple[str, ...] | None, *, foreign: bool = False, in_hook: bool = False
    ) -> None:
        """A gradient collective was issued. ``names`` are its parameters, None if it cannot be told which of the group's.

        ``foreign``: a loop gave it a tensor that is nobody's gradient. ``in_hook``: a communication hook or a future
        chained to its did. Which thread runs such a future, and when, differs by rank: its order is nothing to compare.
        """
        size = len(reduction.ranks) or self.world_size
        group = self._groups.setdefault(reduction.group, _Group(reduction.ranks, size))
        if not in_hook:
            group.identity = crc_of(_code(reduction.op, reduction.dtype, reduction.wire.numel, names), group.identity)
            group.collectives += 1
        group.foreign += foreign
        if not reduction.steady and reduction.op.startswith("allreduce"):
            (self._unseen_in_hook if in_hook else self._unseen).add(reduction.group)
        if size == 1:
            return
        if names is None:
            self._all_of(reduction.group)
            return
        self._reduced.update(names)
        self._during.update(names)

    def _all_of(self, group: str) -> None:
        """A bucket was reduced, nobody knows whose: all of the group's, then. Noted once, since buckets and parameters are many."""
        if group not in self._replicas:
            self._all_reduced = self._all_during = True
        elif group not in self._noted:
            self._noted.add(group)
            self._reduced.update(self._replicas[group])
            self._during.update(self._replicas[group])

    def returned(self, reduction: Reduction, norm: float, word_sum: int | None, audit: Audit | None) -> None:
        """A gradient all-reduce's result was looked at: its norm always, its word sum and the audit when it was its turn."""
        group = self._groups.get(reduction.group)
        if group is None:
            return
        group.squares += norm * norm
        if word_sum is not None:
            group.fingerprint ^= crc_of(word_sum, reduction.index)
        if audit is not None:
            group.audited = audit if group.audited is None else group.audited.plus(audit)

    def look_at_gradients(self, round_: int, *, in_hook: bool) -> None:
        """Results that could not be looked at as they came are looked at where they went: the gradients that ranks have in common.

        Those of a communication hook are there when backward ends, a loop's own when the optimizer steps.
        """
        groups = self._unseen_in_hook if in_hook else self._unseen
        for name in sorted(groups & self._groups.keys()):
            for index, gradient in enumerate(self._gradients(name)):
                if its_turn(gradient.numel(), index, round_):
                    self._groups[name].fingerprint ^= crc_of(word_sum(gradient), index)
        groups.clear()

    def _gradients(self, group: str) -> list[torch.Tensor]:
        parameters = _alive(self._replicas.get(group, {}).values())
        return [part for p in parameters if p.grad is not None and (part := local_part(p.grad)) is not None]

    def unreduced(self) -> list[str]:
        """Names of the gradients that this round's backwards added to and that no collective has reduced since."""
        if self._all_reduced or self.world_size == 1:
            return []
        return [name for name in sorted(self._touched) if name not in self._reduced]

    def weights(self, unreduced: Iterable[tuple[str, torch.Tensor]]) -> tuple[Weights, ...]:
        """Fingerprints of the replicated parameters of each group, and of the unreduced ones."""
        found = [_weights(group, _alive(named.values())) for group, named in sorted(self._replicas.items())]
        found.append(_weights(UNREDUCED, (tensor for _, tensor in unreduced)))
        return tuple(one for one in found if one is not None)

    def norm(self) -> float:
        """L2 norm of all results that were looked at in this round."""
        return math.sqrt(sum(group.squares for group in self._groups.values()))

    def close(self) -> tuple[GroupSync, ...]:
        """This round's reductions by group; begins the next round."""
        records = tuple(self._record(name, group) for name, group in sorted(self._groups.items()))
        self._groups = {}
        self._reduced.clear()
        self._noted.clear()
        self._touched.clear()
        self._unseen.clear()
        self._unseen_in_hook.clear()
        self._all_reduced = False
        return records

    def _record(self, name: str, group: _Group) -> GroupSync:
        first = name not in self._announced
        self._announced.add(name)
        one = group.audited or _NOT_AUDITED
        return GroupSync(
            group=name,
            ranks=group.ranks if first else (),
            size=group.size,
            collectives=group.collectives,
            identity=group.identity,
            fingerprint=group.fingerprint,
            norm=math.sqrt(group.squares),
            foreign=group.foreign,
            audited=one.index,
            sum_in=one.sum_in,
            sum_out=one.sum_out,
            audited_numel=one.numel,
            audited_absmax=one.absmax,
            audited_op=one.op,
            audited_dtype=one.dtype,
        )


@functools.lru_cache(maxsize=4096)
def _code(op: str, dtype: str, numel: int, names: tuple[str, ...] | None) -> int:
    """A number for what a collective covers, the same in every process."""
    return zlib.crc32(f"{op}|{dtype}|{numel}|{','.join(names or ())}".encode())


def _alive(refs: Iterable[weakref.ref[torch.Tensor]]) -> Iterable[torch.Tensor]:
    return (parameter for ref in refs if (parameter := ref()) is not None)


def _weights(group: str, tensors: Iterable[torch.Tensor]) -> Weights | None:
    parts = [part for tensor in tensors if (part := local_part(tensor)) is not None]
    return Weights(group, fingerprint(parts), len(parts)) if parts else None
