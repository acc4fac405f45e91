"""The micro-batches of a part: which tensors are stored under which name, and what is said about the others.

Owns names and order of ``batches.safetensors`` and its mirror in ``part.json``. A tensor that several entries hold is stored once,
under the name of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from sentinel.bundle.manifest import BatchEntry, SampleFinding, TensorStatistics
from sentinel_agent.capture import Branch, Drop, Held, Omitted, walk_tensors
from sentinel_agent.contents import is_readable, sparse_parts
from sentinel_agent.redaction import Redaction
from sentinel_agent.statistics import sample_findings, tensor_statistics
from sentinel_agent.structure import describe
from sentinel_agent.tensorfile import Names, storable
from sentinel_agent.window import Entry

# Reasons of this module; those of the window are capture.Drop.
OVER_BUDGET: Final = "byte_cap"
NO_DTYPE: Final = "dtype_not_storable"
FREED: Final = "storage_freed"


class BatchDump:
    """The entries of one round, ready to be written: ``tensors`` is what goes into the file.

    ``take(bytes)`` says whether there is still room. ``redaction`` decides what of it may be written; statistics and findings are
    of what the training saw. Build it first, write ``tensors``, then ask for the rest, so that a change during the writing is
    noticed too.
    """

    def __init__(
        self, entries: tuple[Entry, ...], take: Callable[[int], bool], redaction: Redaction | None = None
    ) -> None:
        self.tensors: list[tuple[str, Tensor]] = []
        self._entries = entries
        self._take = take
        self._redaction = redaction or Redaction()
        self._names: dict[Held, str] = {}  # every readable tensor, stored or not
        self._missing: dict[Held, str] = {}
        self._unique = Names()
        for index, entry in enumerate(entries):
            for path, held in walk_tensors(entry.captured.tree, f"b{index}"):
                if held not in self._names:
                    self._place(path, held)

    def _place(self, path: str, held: Held) -> None:
        name = self._names[held] = self._unique.take(path)
        if held.array is None and not is_readable(held.tensor):
            self._missing[held] = FREED
            return
        content = self._redaction.tensor(name, _contents(held))
        if content is None:
            self._missing[held] = Drop.REDACTED
            return
        parts = _stored_as(name, content)
        if not all(storable(tensor) for _, tensor in parts):
            self._missing[held] = NO_DTYPE
        elif not self._take(sum(tensor.nbytes for _, tensor in parts)):
            self._missing[held] = OVER_BUDGET
        else:
            self.tensors += parts

    def described(self, round_: int) -> tuple[BatchEntry, ...]:
        """The entries as ``part.json`` lists them."""
        return tuple(self._describe(index, round_, entry) for index, entry in enumerate(self._entries))

    def _describe(self, index: int, round_: int, entry: Entry) -> BatchEntry:
        held = list(dict.fromkeys(held for _, held in walk_tensors(entry.captured.tree)))
        stored = {one: self._names[one] for one in held if one not in self._missing}
        left_out = [f"{self._names[one]}: {self._missing[one]}" for one in held if one in self._missing]
        left_out += [f"{path}: {leaf.reason}" for path, leaf in _omitted(entry.captured.tree, f"b{index}")]
        return BatchEntry(
            index=index,
            round=round_,
            source=entry.source,
            structure=describe(self._redaction.texts(entry.captured, f"b{index}"), stored, self._missing),
            sample_indices=_integers(entry.sample_indices),
            mutated=tuple(name for one, name in stored.items() if one.changed()),
            omitted=tuple(left_out),
        )

    def statistics(self) -> tuple[TensorStatistics, ...]:
        """Statistics of every tensor that can be read, stored or not."""
        return tuple(tensor_statistics(name, tensor) for name, tensor in self._readable())

    def findings(self) -> tuple[SampleFinding, ...]:
        """Odd samples of every tensor that can be read, stored or not."""
        return tuple(finding for name, tensor in self._readable() for finding in sample_findings(name, tensor))

    def _readable(self) -> Iterator[tuple[str, Tensor]]:
        for held, name in self._names.items():
            if self._missing.get(held) != FREED:
                yield name, _contents(held)


def _contents(held: Held) -> Tensor:
    if held.array is None:
        return held.tensor
    # A copy: torch warns about arrays that are read-only, and knows no negative strides.
    return torch.from_numpy(numpy.array(held.array))


def _stored_as(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    if tensor.layout is torch.strided:
        return [(name, tensor)]
    return [(f"{name}.{part}", piece) for part, piece in sparse_parts(tensor).items()]


def _omitted(node: object, path: str) -> Iterator[tuple[str, Omitted]]:
    if isinstance(node, Omitted):
        yield path, node
    elif isinstance(node, Branch):
        keys: Any = range(len(node.children)) if node.keys is None else node.keys
        for key, child in zip(keys, node.children, strict=True):
            yield from _omitted(child, f"{path}.{key}")


def _integers(indices: tuple[Any, ...] | None) -> tuple[int, ...] | None:
    """Sample indices if they are numbers; a sampler may as well yield names or pairs."""
    if indices is None:
        return None
    try:
        return tuple(index.__index__() for index in indices)
    except (AttributeError, TypeError, ValueError):
        return None
