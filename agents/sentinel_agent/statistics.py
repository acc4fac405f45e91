"""Numbers about one tensor, and which samples of a batch look odd.

Owns statistics that are right at the edges of every dtype: nothing here overflows where the tensor itself does not. Runs when a
part is written, never in a healthy round; it may synchronise an accelerator. What is done with the numbers is in ``dump.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from sentinel.bundle.manifest import SampleFinding, TensorStatistics
from sentinel_agent.contents import is_readable, local, sparse_parts

MAX_FINDINGS: Final = 16  # of one kind for one tensor; the total is in the detail
MIN_CONSTANT: Final = 4  # elements a sample must have before having one value only is odd

_QUICK: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
_CHUNK: Final = 1 << 20  # elements widened to float64 at a time
_QUICK_CHUNK: Final = 1 << 17  # elements summed in float32 at a time: fits a cache, and keeps rounding below 1e-5
_QUICK_LOW: Final = 1e-15  # float32's squares lose digits below, and overflow in sums above
_QUICK_HIGH: Final = 1e15
_QUICK_SPREAD: Final = (
    0.25  # share of the squares that must be left about the mean, or the difference has lost its digits
)
_SQUARE_LIMIT: Final = 1e150  # above this, squares of float64 overflow: scale down first


def tensor_statistics(name: str, tensor: Tensor) -> TensorStatistics:
    """Statistics of ``tensor`` (of this rank's part, if it is distributed), over its finite elements.

    Complex numbers count as their real and imaginary parts, sparse tensors as their stored values. A dtype that torch cannot
    convert (packed four bit floats) or a tensor without contents gives its dtype and shape only.
    """
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    moments = _Moments()
    try:
        for flat in _flats(tensor):
            quick = flat.dtype in _QUICK and flat.device.type == "cpu"
            for chunk in torch.split(flat, _QUICK_CHUNK) if quick else (flat,):
                if not quick or not moments.add_quickly(chunk.to(torch.float32)):
                    moments.add(_float64(chunk))
    except (RuntimeError, TypeError):
        return TensorStatistics(name=name, dtype=dtype, shape=shape)
    return TensorStatistics(name=name, dtype=dtype, shape=shape, nan=moments.nan, inf=moments.inf, **moments.summary())


def sample_findings(name: str, tensor: Tensor) -> list[SampleFinding]:
    """Samples (rows along dimension 0) with NaN, with infinities, or with one value only.

    Only floating and complex tensors: integers are labels and token ids as often as they are measurements. A tensor of zeros
    and ones is a mask or a one-hot label, whose rows may well be constant.
    """
    rows = _rows(tensor)
    if rows is None:
        return []
    nan = rows.isnan()
    inf = rows.isinf()
    findings = _counted(name, "nan", nan) + _counted(name, "inf", inf)
    if rows.shape[1] >= MIN_CONSTANT:
        findings += _constant(name, rows, (nan | inf).any(dim=1))
    return findings


@dataclass(slots=True)
class _Moments:
    """Running counts, extremes, mean and sum of squared differences, merged chunk by chunk."""

    nan: int = 0
    inf: int = 0
    count: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    mean: float = 0.0
    squares: float = 0.0
    scale: float = 1.0

    def add_quickly(self, chunk: Tensor) -> bool:
        """Merge a chunk of float32 in three reads; False, and nothing is merged, where that would not be exact enough."""
        low, high = (bound.item() for bound in chunk.aminmax())
        magnitude = max(abs(low), abs(high))
        if not _QUICK_LOW < magnitude < _QUICK_HIGH or self.scale != 1.0:  # also true of NaN
            return False
        count = chunk.numel()
        mean, norm = chunk.sum().item() / count, torch.linalg.vector_norm(chunk).item()
        squares = norm * norm - count * mean * mean
        if squares < _QUICK_SPREAD * norm * norm:
            return False
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        self._merge(count, mean, squares)
        return True

    def add(self, chunk: Tensor) -> None:
        """Merge one chunk of float64 values."""
        finite = chunk.isfinite()
        if not bool(finite.all()):
            nan = int(chunk.isnan().sum())
            self.nan += nan
            self.inf += int((~finite).sum()) - nan
            chunk = chunk[finite]
        if chunk.numel() == 0:
            return
        low, high = (bound.item() for bound in chunk.aminmax())
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        self._rescale(max(abs(low), abs(high)))
        chunk = chunk if self.scale == 1.0 else chunk / self.scale
        mean = chunk.mean().item()
        self._merge(chunk.numel(), mean, (chunk - mean).square_().sum().item())

    def _rescale(self, magnitude: float) -> None:
        """Keep mean and squares in units of ``scale``, so that neither leaves float64's range."""
        if magnitude <= _SQUARE_LIMIT or magnitude <= self.scale:
            return
        self.mean *= self.scale / magnitude
        self.squares *= (self.scale / magnitude) ** 2
        self.scale = magnitude

    def _merge(self, count: int, mean: float, squares: float) -> None:
        """Take in ``count`` elements of this mean, whose squared differences from it sum to ``squares`` (Chan et al. 1983)."""
        total = self.count + count
        difference = mean - self.mean
        self.squares += squares + difference**2 * self.count * count / total
        self.mean += difference * count / total
        self.count = total

    def summary(self) -> dict[str, float | None]:
        """The fields of TensorStatistics; all None if no element was finite."""
        if self.count == 0:
            return {"minimum": None, "maximum": None, "mean": None, "std": None}
        std = math.sqrt(self.squares / self.count) * self.scale
        return {"minimum": self.minimum, "maximum": self.maximum, "mean": self.mean * self.scale, "std": std}


def _flats(tensor: Tensor) -> Iterator[Tensor]:
    """The elements as they lie, in flat pieces. Raises RuntimeError where torch cannot read the dtype."""
    for part in _parts(tensor):
        if part.numel():
            yield from torch.split(part.reshape(-1), _CHUNK)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    tensor = local(tensor).detach()
    if not is_readable(tensor):
        return ()
    if tensor.layout is not torch.strided:
        return _parts(sparse_parts(tensor)["values"])
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return (tensor,)


def _float64(flat: Tensor) -> Tensor:
    if flat.is_floating_point() and flat.element_size() == 1:
        flat = flat.to(torch.float32)  # eight bit floats convert to float32 only, on some devices
    if flat.device.type == "mps":
        flat = flat.cpu()  # has no float64
    return flat.to(torch.float64)


def _rows(tensor: Tensor) -> Tensor | None:
    """``tensor`` as a matrix with a sample in each row, in a dtype that can be compared; None if it has no samples."""
    tensor = local(tensor).detach()
    if tensor.layout is not torch.strided or tensor.dim() == 0 or tensor.numel() == 0 or not is_readable(tensor):
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    try:  # eight bit floats cannot be compared
        widened = tensor.to(torch.float32) if tensor.element_size() == 1 else tensor
    except (RuntimeError, TypeError):
        return None
    return widened.reshape(tensor.shape[0], -1)


def _counted(name: str, what: Literal["nan", "inf"], hits: Tensor) -> list[SampleFinding]:
    per_row = hits.sum(dim=1)
    samples = per_row.nonzero().flatten().tolist()
    counts = {sample: int(per_row[sample]) for sample in samples[:MAX_FINDINGS]}
    width = hits.shape[1]
    return [
        SampleFinding(tensor=name, sample=sample, what=what, detail=f"{count} of {width} elements{_of(samples, hits)}")
        for sample, count in counts.items()
    ]


def _constant(name: str, rows: Tensor, nonfinite: Tensor) -> list[SampleFinding]:
    first = rows[:, 0]
    samples = ((rows == first[:, None]).all(dim=1) & ~nonfinite).nonzero().flatten().tolist()
    if not samples or bool(((rows == 0) | (rows == 1)).all()):
        return []
    width = rows.shape[1]
    return [
        SampleFinding(
            tensor=name,
            sample=sample,
            what="constant",
            detail=f"all {width} elements are {first[sample].item():g}{_of(samples, rows)}",
        )
        for sample in samples[:MAX_FINDINGS]
    ]


def _of(samples: list[int], rows: Tensor) -> str:
    return f"; {len(samples)} of {rows.shape[0]} samples"
