"""Shards put together: the parameters of a bundle as one file that a single process can load.

Owns the putting together and the file's layout: the library's writer takes only dtypes that numpy has. Bytes are moved as they are,
whatever the dtype; nothing is converted, nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sentinel.bundle.manifest import PARAMETERS_FILE
from sentinel.bundle.paths import BundleRefused, printable
from sentinel.bundle.reader import Bundle, Part


class Merged:
    """The parameters and buffers of all parts, whole. Raises BundleRefused if a part is missing that holds a piece of one."""

    def __init__(self, bundle: Bundle) -> None:
        self._whole: dict[str, NDArray[Any]] = {}
        self._filled: dict[str, NDArray[np.bool_]] = {}
        self._dtypes: dict[str, str] = {}
        self._elements = _elements(bundle)
        for _, part in sorted(bundle.parts.items()):
            self._take(part)
        lacking = sorted(name for name, filled in self._filled.items() if not filled.all())
        if lacking:
            raise BundleRefused(
                f"{printable(lacking[0])} and {len(lacking) - 1} others lack pieces: parts of some ranks are missing"
                if len(lacking) > 1
                else f"{printable(lacking[0])} lacks pieces: parts of some ranks are missing"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what was put together."""
        return tuple(sorted(self._whole))

    def write(self, path: Path) -> None:
        """Write one safetensors file. Raises OSError."""
        # Wide elements first, so that each tensor starts at a multiple of its element size, as the library does.
        ordered = sorted(self._whole.items(), key=lambda named: (-named[1].dtype.itemsize, named[0]))
        header, end = dict[str, object](), 0
        for name, whole in ordered:
            start, end = end, end + whole.nbytes
            header[name] = {"dtype": self._dtypes[name], "shape": whole.shape, "data_offsets": (start, end)}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        with path.open("wb") as out:
            out.write(len(encoded).to_bytes(8, "little") + encoded)
            for _, whole in ordered:
                out.write(whole.tobytes())

    def _take(self, part: Part) -> None:
        for name, dtype, values in _tensors(part):
            shard = part.header.shards.get(name)
            shape = values.shape if shard is None else shard.shape
            offset = (0,) * len(shape) if shard is None else shard.offset
            if name not in self._whole:
                if math.prod(shape) > self._elements[name]:  # before memory is asked for: a header may say anything
                    raise BundleRefused(f"{printable(name)} lacks pieces: parts of some ranks are missing")
                self._whole[name] = np.zeros(shape, values.dtype)
                self._filled[name] = np.zeros(shape, np.bool_)
                self._dtypes[name] = dtype
            whole = self._whole[name]
            if whole.shape != shape or whole.dtype != values.dtype or len(offset) != values.ndim:
                raise BundleRefused(
                    f"{printable(name)} has another shape or dtype in the part of rank {part.header.rank}"
                )
            if min(offset, default=0) < 0:
                raise BundleRefused(f"{printable(name)} of rank {part.header.rank} lies outside of the whole")
            place = tuple(slice(at, at + size) for at, size in zip(offset, values.shape, strict=True))
            if whole[place].shape != values.shape:
                raise BundleRefused(f"{printable(name)} of rank {part.header.rank} lies outside of the whole")
            whole[place] = values
            self._filled[name][place] = True


def _tensors(part: Part) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """(name, dtype, elements as raw bytes) of a part's parameters and buffers."""
    file = part.tensors(PARAMETERS_FILE)
    if file is None:
        return
    for name in file.names:
        entry = file.entry(name)
        count = math.prod(entry.shape)
        width = entry.bytes // count if count else 1
        yield name, entry.dtype, np.frombuffer(file.raw(name), dtype=f"V{width}").reshape(entry.shape)


def _elements(bundle: Bundle) -> Counter[str]:
    """How many elements of each name there are in all parts together."""
    found: Counter[str] = Counter()
    for part in bundle.parts.values():
        file = part.tensors(PARAMETERS_FILE)
        for name in file.names if file is not None else ():
            found[name] += math.prod(file.entry(name).shape) if file is not None else 0
    return found
