"""Gives the script the recorded micro-batches: through its DataLoader, or as inputs of its forward.

Owns which batch is next, the comparison of what the script made by itself with what was recorded, and the replacing of single
samples. It knows nothing of when the recorded round begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from sentinel.bundle.manifest import BatchEntry
from sentinel_agent.replay.bits import same_bits
from sentinel_agent.replay.rebuild import NotRebuildable, rebuild
from sentinel_agent.replay.recording import Recording, flat_tensors

Inputs = Literal["equal", "substituted", "fed", "unseen"]


class Feed:
    """The recorded micro-batches, handed out in order. ``replaced`` are samples whose rows get those of ``by``."""

    def __init__(self, recording: Recording, replaced: tuple[int, ...] = (), by: int = 0) -> None:
        self.inputs: Inputs = "unseen"
        self.notes: list[str] = []
        self.batch_size: int | None = None
        self._recording = recording
        self._loaded = [entry for entry in recording.entries if entry.source == "loader"]
        self._forwards = [entry for entry in recording.entries if entry.source == "forward"]
        self._replaced = replaced
        self._by = by
        self._fed = 0
        self._forwarded = 0

    @property
    def from_loader(self) -> bool:
        """True if the recorded batches can be handed to the script's DataLoader."""
        return bool(self._loaded) and not any(entry.omitted for entry in self._loaded)

    @property
    def loader_is_empty(self) -> bool:
        """True if every loader batch was handed out."""
        return self._fed >= len(self._loaded)

    def next_batch(self) -> Any:
        """The next batch for the DataLoader. Raises NotRebuildable."""
        entry = self._loaded[self._fed]
        self._fed += 1
        batch = rebuild(entry.structure, self._recording.batches)
        self.inputs = "fed"
        tensors = flat_tensors(batch)
        self._note_size(tensors)
        self.replace(tensors)
        return batch

    def forward_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        """What the next forward shall get, and whether that is something else than the script made."""
        if self._forwarded >= len(self._forwards):
            return args, kwargs, False
        entry = self._forwards[self._forwarded]
        self._forwarded += 1
        live = {"args": args, "kwargs": kwargs} if kwargs else {"args": args}
        if self._replaced and self.inputs == "fed":
            return args, kwargs, False  # differs from the recorded ones on purpose
        try:
            recorded = rebuild(entry.structure, self._recording.batches, live)
        except NotRebuildable as error:
            self.notes.append(
                f"inputs of forward {self._forwarded - 1} are compared in part only: {error} was not recorded"
            )
            return args, kwargs, False
        self._note_size(flat_tensors(recorded))
        if self._equal(entry, live, recorded):
            self.inputs = "equal" if self.inputs == "unseen" else self.inputs
            return args, kwargs, False
        self.inputs = "substituted"
        if _overwritten(live, recorded):
            return args, kwargs, True
        return tuple(recorded["args"]), dict(recorded.get("kwargs", {})), True

    def rng_name(self) -> str:
        """Under which name the RNG states of the forward just handed out are recorded."""
        return f"b{self._forwards[self._forwarded - 1].index}"

    def replace(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the rows of the replaced samples in every tensor that has a row for each sample."""
        seen: set[int] = set()
        with torch.no_grad():
            for tensor in tensors:
                if tensor.dim() and tensor.shape[0] == self.batch_size and tensor.data_ptr() not in seen:
                    seen.add(tensor.data_ptr())
                    for row in self._replaced:
                        tensor.detach()[row] = tensor.detach()[self._by]

    @property
    def replaces(self) -> bool:
        """True if some samples are to be replaced."""
        return bool(self._replaced)

    def _note_size(self, tensors: list[Tensor]) -> None:
        sizes = [tensor.shape[0] for tensor in tensors if tensor.dim()]
        if self.batch_size is None and sizes:
            self.batch_size = sizes[0]

    def _equal(self, entry: BatchEntry, live: Any, recorded: Any) -> bool:
        """Bit by bit; tensors that were written to after they were caught prove nothing."""
        if entry.mutated:
            return True
        mine, theirs = flat_tensors(live), flat_tensors(recorded)
        return len(mine) == len(theirs) and all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))


@torch.no_grad()
def _overwritten(live: Any, recorded: Any) -> bool:
    """Write what was recorded into the script's own tensors, which it may go on to use after the forward; False if not all fit."""
    mine, theirs = flat_tensors(live), flat_tensors(recorded)
    if len(mine) != len(theirs):
        return False
    if not all(
        a.shape == b.shape and a.dtype == b.dtype and a.grad_fn is None for a, b in zip(mine, theirs, strict=True)
    ):
        return False
    for tensor, contents in zip(mine, theirs, strict=True):
        tensor.detach().copy_(contents)
    return True
