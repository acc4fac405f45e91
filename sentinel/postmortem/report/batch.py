"""A rank's batch as something to look at: images as images, token ids as numbers, everything else as a histogram.

Owns what is shown of a tensor, and the limits: a bundle may hold gigabytes, a page may not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sentinel.bundle.manifest import BATCHES_FILE, BatchEntry, PartHeader
from sentinel.bundle.reader import Bundle, BundleRefused
from sentinel.bundle.tensors import TensorFile
from sentinel.postmortem.report.images import data_uri, picture
from sentinel.postmortem.samples import sample_sentences

SAMPLES_SHOWN = 16
TOKENS_SHOWN = 24
LABELS_SHOWN = 64
TENSORS_SHOWN = 6
MAX_TENSOR_BYTES = 64 << 20
BINS = 40


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample of a tensor: its picture or its numbers, and what is odd about it."""

    index: int
    data_set_index: int | None
    odd: str
    uri: str = ""
    tokens: tuple[int, ...] = ()
    cut: bool = False


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor of a batch. ``problem`` says why there is nothing to see."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nan: int = 0
    inf: int = 0
    minimum: float | None = None
    maximum: float | None = None
    form: str = "numbers"  # images, tokens, labels, rows, numbers
    samples: tuple[SampleView, ...] = ()
    samples_total: int = 0
    counts: tuple[int, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class BatchView:
    """What one rank trained on in the round."""

    rank: int
    suspect: bool
    sentences: tuple[str, ...]
    tensors: tuple[TensorView, ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Proven:
    """Samples that a replay found guilty, in batches of ``size``."""

    samples: tuple[int, ...]
    size: int


def batch_view(bundle: Bundle, header: PartHeader, suspect: bool, proven: Proven | None = None) -> BatchView:
    """The batches of the part's own round."""
    entries = {f"b{entry.index}": entry for entry in header.batches if entry.round == header.round}
    try:
        file = bundle.part(header.rank).tensors(BATCHES_FILE)
    except BundleRefused:
        file = None
    names = [name for name in (file.names if file else ()) if name.partition(".")[0] in entries]
    names.sort(key=lambda n: (not _odd_samples(header, n), int(n.partition(".")[0][1:]), n))
    shown = names[:TENSORS_SHOWN] if file is not None else []
    views = tuple(_view(file, name, entries, _odd_samples(header, name), proven) for name in shown if file is not None)
    sentences = tuple(sample_sentences(header))
    return BatchView(header.rank, suspect, sentences, views, max(len(names) - TENSORS_SHOWN, 0))


def _odd_samples(header: PartHeader, name: str) -> dict[int, str]:
    """What is odd about single samples of a tensor, in words."""
    own = (f for f in header.sample_findings if f.tensor == name)
    return {f.sample: f"{f.what}: {f.detail}" if f.detail else f.what for f in own}


def _view(
    file: TensorFile, name: str, entries: dict[str, BatchEntry], odd: dict[int, str], proven: Proven | None
) -> TensorView:
    entry = file.entry(name)
    if entry.bytes > MAX_TENSOR_BYTES:
        return TensorView(name, entry.dtype, entry.shape, problem=f"{entry.bytes >> 20} MiB, too large to draw")
    try:
        array, statistics = file.array(name), file.statistics(name)
    except BundleRefused as refusal:
        return TensorView(name, entry.dtype, entry.shape, problem=str(refusal))
    if array.size == 0 or np.iscomplexobj(array):
        return TensorView(
            name, entry.dtype, entry.shape, problem="no elements" if array.size == 0 else "complex numbers"
        )
    form = _form(array)
    low, high = statistics.minimum, statistics.maximum
    if proven is not None and entry.shape[:1] == (proven.size,):
        odd = {**dict.fromkeys(proven.samples, "guilty: by replay"), **odd}
    limit = LABELS_SHOWN if form == "labels" else SAMPLES_SHOWN
    shown = _chosen(array.shape[0], odd, limit) if form != "numbers" else []
    indices = entries[name.partition(".")[0]].sample_indices
    return TensorView(
        name,
        entry.dtype,
        entry.shape,
        statistics.nan,
        statistics.inf,
        low,
        high,
        form,
        tuple(_samples(array, shown, odd, indices, form, (low or 0.0, high or 0.0))),
        array.shape[0] if array.ndim else 0,
        tuple(_counts(array, low, high)),
    )


def _form(array: NDArray[Any]) -> str:
    integers = array.dtype.kind in "iu" and array.dtype != np.uint8
    if array.ndim in (3, 4) and not integers and _picture_axes(array) is not None:
        return "images"
    if array.ndim == 2 and integers:
        return "tokens"
    if array.ndim == 2 and array.dtype.kind == "f" and array.shape[1] > 1:
        return "rows"
    return "labels" if array.ndim == 1 and integers else "numbers"


def _picture_axes(array: NDArray[Any]) -> str | None:
    shape = array.shape
    if array.ndim == 3:
        return "hw" if min(shape[1:]) >= 8 else None
    if shape[1] in (1, 3, 4) and min(shape[2:]) >= 4:
        return "chw"
    return "hwc" if shape[3] in (1, 3, 4) and min(shape[1:3]) >= 4 else None


def _chosen(total: int, odd: dict[int, str], limit: int) -> list[int]:
    """Odd samples, and the first others, in their order."""
    chosen = sorted(i for i in odd if i < total)[:limit]
    others = [i for i in range(min(total, 2 * limit)) if i not in odd]
    return sorted([*chosen, *others[: limit - len(chosen)]])


def _samples(
    array: NDArray[Any],
    shown: list[int],
    odd: dict[int, str],
    indices: tuple[int, ...] | None,
    form: str,
    span: tuple[float, float],
) -> Iterator[SampleView]:
    axes = _picture_axes(array) if form == "images" else None
    for index in shown:
        place = indices[index] if indices and index < len(indices) else None
        said = odd.get(index, "")
        if form in ("tokens", "labels"):
            ids = np.atleast_1d(array[index]).ravel()
            yield SampleView(
                index, place, said, tokens=tuple(int(i) for i in ids[:TOKENS_SHOWN]), cut=ids.size > TOKENS_SHOWN
            )
        else:
            yield SampleView(index, place, said, uri=data_uri(picture(_image(array[index], axes), *span)))


def _image(sample: NDArray[Any], axes: str | None) -> NDArray[Any]:
    if axes == "chw":
        return np.moveaxis(sample, 0, -1)
    return sample if axes is not None else sample[None, :]


def _counts(array: NDArray[Any], low: float | None, high: float | None) -> Iterator[int]:
    """Elements per bin. Scaled first: the span of float64 extremes does not fit float64."""
    if low is None or high is None or low == high or array.dtype.kind == "b":
        return
    scale = max(abs(low), abs(high))
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array.ravel()
    counts, _ = np.histogram(finite.astype(np.float64) / scale, bins=BINS, range=(low / scale, high / scale))
    yield from (int(count) for count in counts)


def magnitude_level(value: float | None, low: float, high: float) -> int:
    """0 to 4: where a magnitude lies between two others, in decades."""
    if value is None or value <= 0 or not math.isfinite(value) or high <= low:
        return 0
    share = (math.log10(value) - math.log10(low)) / (math.log10(high) - math.log10(low)) if low > 0 else 1.0
    return min(4, max(0, int(5 * share)))
