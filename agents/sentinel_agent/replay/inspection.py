"""What is odd about the recorded batch, and whether the innocent ranks' batches are odd in the same way.

Owns the questions asked of a batch: nonfinite values, constant samples, extreme values, empty masks, labels that are all ignored,
duplicates. Each answer names the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from sentinel.bundle.reader import Bundle, BundleRefused
from sentinel.bundle.replayed import BatchFinding
from sentinel_agent.replay.recording import Recording

MAX_SAMPLES: Final = 16
MAX_OTHER_RANKS: Final = 8
EXTREME: Final = 1e4  # times the typical magnitude of the tensor
_IGNORED: Final = -100  # the label that torch's losses leave out by default
MIN_ELEMENTS: Final = 4


def inspect_batch(bundle: Bundle, recording: Recording) -> tuple[BatchFinding, ...]:
    """Findings of this rank's batch; ``elsewhere`` where another rank's batch shows the same."""
    mine = list(_findings(recording))
    if not mine:
        return ()
    elsewhere: set[tuple[str, str]] = set()
    for rank in [rank for rank in bundle.ranks if rank != recording.header.rank][:MAX_OTHER_RANKS]:
        try:
            elsewhere |= {(one.tensor, one.what) for one in _findings(Recording(bundle, rank))}
        except BundleRefused:
            continue
    return tuple(one.model_copy(update={"elsewhere": (one.tensor, one.what) in elsewhere}) for one in mine)


def _findings(recording: Recording) -> Iterator[BatchFinding]:
    for name, tensor in recording.batches.items():
        if tensor.dim() == 0 or tensor.numel() == 0:
            continue
        rows = tensor.reshape(tensor.shape[0], -1)
        for what, look in _LOOKS.items():
            hits = look(rows)
            if hits is not None and bool(hits.any()):
                yield _finding(name, what, hits, tensor)


def _finding(name: str, what: str, hits: Tensor, tensor: Tensor) -> BatchFinding:
    samples = tuple(hits.nonzero().flatten().tolist())
    detail = f"{_WORDS[what]} in {len(samples)} of {tensor.shape[0]} samples"
    return BatchFinding(tensor=name, what=what, samples=samples[:MAX_SAMPLES], detail=detail)


def _nan(rows: Tensor) -> Tensor | None:
    return rows.isnan().any(dim=1) if rows.is_floating_point() else None


def _inf(rows: Tensor) -> Tensor | None:
    return rows.isinf().any(dim=1) if rows.is_floating_point() else None


def _constant(rows: Tensor) -> Tensor | None:
    if not rows.is_floating_point() or rows.shape[1] < MIN_ELEMENTS or bool(((rows == 0) | (rows == 1)).all()):
        return None
    return (rows == rows[:, :1]).all(dim=1)


def _extreme(rows: Tensor) -> Tensor | None:
    if not rows.is_floating_point() or rows.shape[0] < 2:
        return None
    magnitudes = rows.float().abs().nan_to_num(0.0, 0.0, 0.0)
    typical = magnitudes.flatten()[magnitudes.flatten() > 0]
    return magnitudes.amax(dim=1) > EXTREME * typical.median() if typical.numel() else None


def _empty_mask(rows: Tensor) -> Tensor | None:
    flags = rows.dtype is torch.bool or (rows.shape[1] > 1 and bool(((rows == 0) | (rows == 1)).all()))
    return (rows == 0).all(dim=1) if flags and bool((rows != 0).any()) else None


def _all_ignored(rows: Tensor) -> Tensor | None:
    return (rows == _IGNORED).all(dim=1) if rows.dtype is torch.int64 and rows.shape[1] > 1 else None


def _duplicate(rows: Tensor) -> Tensor | None:
    if rows.shape[0] < 2 or rows.shape[1] < MIN_ELEMENTS or rows.dtype is torch.bool:
        return None
    _, inverse, counts = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    hits: Tensor = counts[inverse] > 1
    return hits


_LOOKS: Final[dict[str, Callable[[Tensor], Tensor | None]]] = {
    "nan": _nan,
    "inf": _inf,
    "constant": _constant,
    "extreme": _extreme,
    "empty_mask": _empty_mask,
    "all_ignored": _all_ignored,
    "duplicate": _duplicate,
}
_WORDS: Final = {
    "nan": "NaN",
    "inf": "infinite values",
    "constant": "one value only (zero variance)",
    "extreme": f"values beyond {EXTREME:g} times the typical magnitude",
    "empty_mask": "a mask with nothing left in it",
    "all_ignored": "labels that are all ignored",
    "duplicate": "the very same values as another sample",
}
