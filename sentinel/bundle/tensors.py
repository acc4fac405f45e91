"""Tensors of a part, read without unpickling and without torch: the safetensors header is checked whole, bytes are read on demand.

Owns the header's checking, and arrays and statistics of single tensors. A dtype that numpy lacks is widened where that is exact
(bfloat16 to float32) and is available as raw bytes everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sentinel.bundle.manifest import TensorStatistics
from sentinel.bundle.paths import BundleRefused, open_directory, open_file, printable, read_range

MAX_HEADER_BYTES = 64 << 20
METADATA = "__metadata__"

_NUMPY: dict[str, np.dtype[Any] | None] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "BF16": None,
    "F8_E4M3": None,
    "F8_E5M2": None,
    "F8_E4M3FNUZ": None,
    "F8_E5M2FNUZ": None,
    "F8_E8M0": None,
}
_ITEM_BYTES = {name: dtype.itemsize if dtype else 1 for name, dtype in _NUMPY.items()} | {"BF16": 2}


class _Slot(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: its safetensors dtype (``F32``, ``BF16``, …), shape and size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    _offset: int


class TensorFile:
    """One ``.safetensors`` file of a part. Only its header is held; every tensor is read when asked for."""

    def __init__(self, part: Path, name: str) -> None:
        """Read and check the header. Raises BundleRefused."""
        self.part = part
        self.name = name
        with open_directory(part) as directory, open_file(name, directory) as (fd, size):
            self._tensors = _read_header(fd, size, name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in the file's order."""
        return tuple(self._tensors)

    def entry(self, name: str) -> TensorEntry:
        """Dtype, shape and size of a tensor. Raises KeyError."""
        return self._tensors[name]

    def raw(self, name: str) -> bytes:
        """A tensor's bytes, little-endian and row-major. Raises KeyError, or BundleRefused if the file has changed."""
        entry = self._tensors[name]
        with open_directory(self.part) as directory, open_file(self.name, directory) as (fd, _):
            return read_range(fd, entry._offset, entry.bytes, self.name)

    def array(self, name: str) -> NDArray[Any]:
        """A tensor as a read-only array; bfloat16 as float32, exactly. Raises BundleRefused for a dtype numpy cannot hold."""
        entry = self._tensors[name]
        dtype = _NUMPY[entry.dtype]
        if dtype is not None:
            return np.frombuffer(self.raw(name), dtype=dtype).reshape(entry.shape)
        if entry.dtype == "BF16":
            return _widen_bfloat16(self.raw(name)).reshape(entry.shape)
        raise BundleRefused(f"{printable(name)} is {entry.dtype}, which numpy cannot hold: read its raw bytes")

    def statistics(self, name: str) -> TensorStatistics:
        """Statistics of a tensor; only dtype and shape where its values cannot be read."""
        entry = self._tensors[name]
        described = TensorStatistics(name=name, dtype=entry.dtype, shape=entry.shape)
        if _NUMPY[entry.dtype] is None and entry.dtype != "BF16":
            return described
        values = self.array(name)
        return described if np.iscomplexobj(values) else described.model_copy(update=_statistics(values))


def _statistics(values: NDArray[Any]) -> dict[str, Any]:
    if values.dtype.kind != "f":
        finite = values.astype(np.float64)
        counts = {"nan": 0, "inf": 0}
    else:
        counts = {"nan": int(np.isnan(values).sum()), "inf": int(np.isinf(values).sum())}
        finite = values[np.isfinite(values)].astype(np.float64)
    if finite.size == 0:
        return counts
    # Scaled first: squares of huge float64 values would overflow to inf in a report about infs.
    scale = float(np.abs(finite).max()) or 1.0
    return counts | {
        "minimum": float(finite.min()),
        "maximum": float(finite.max()),
        "mean": float((finite / scale).mean() * scale),
        "std": float((finite / scale).std() * scale),
    }


def _widen_bfloat16(raw: bytes) -> NDArray[np.float32]:
    """bfloat16 is the upper half of a float32."""
    return (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32)


def _read_header(fd: int, size: int, file: str) -> dict[str, TensorEntry]:
    length = int.from_bytes(read_range(fd, 0, 8, file), "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise BundleRefused(f"{file} has a header of {length} bytes in a file of {size}")
    try:
        slots = msgspec.json.decode(read_range(fd, 8, length, file), type=dict[str, msgspec.Raw])
        slots.pop(METADATA, None)
        parsed = {name: msgspec.json.decode(slot, type=_Slot) for name, slot in slots.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleRefused(f"{file} has no safetensors header: {str(error)[:120]}") from error
    start = 8 + length
    tensors = {name: _entry(name, slot, start, size, file) for name, slot in parsed.items()}
    _check_layout(tensors, start, size, file)
    return tensors


def _entry(name: str, slot: _Slot, start: int, size: int, file: str) -> TensorEntry:
    if slot.dtype not in _ITEM_BYTES:
        raise BundleRefused(f"{file}: {printable(name)} has the unknown dtype {printable(slot.dtype)}")
    begin, end = slot.data_offsets
    if any(n < 0 for n in slot.shape) or not 0 <= begin <= end or start + end > size:
        raise BundleRefused(f"{file}: {printable(name)} lies outside of the file")
    if end - begin != math.prod(slot.shape) * _ITEM_BYTES[slot.dtype]:
        raise BundleRefused(f"{file}: {printable(name)} has {end - begin} bytes, not those of its shape")
    return TensorEntry(name, slot.dtype, tuple(slot.shape), end - begin, start + begin)


def _check_layout(tensors: dict[str, TensorEntry], start: int, size: int, file: str) -> None:
    """Tensors must fill the file without overlap or gap, as the format says; anything else hides bytes."""
    position = start
    for entry in sorted(tensors.values(), key=lambda e: (e._offset, e.bytes)):
        if entry._offset != position:
            raise BundleRefused(f"{file}: {printable(entry.name)} overlaps another tensor or leaves a gap")
        position += entry.bytes
    if position != size:
        raise BundleRefused(f"{file} holds {size - position} bytes that no tensor owns")
