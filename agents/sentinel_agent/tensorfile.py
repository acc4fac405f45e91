"""Writes one safetensors file, a tensor at a time.

Owns the layout of the file and the names in it. The library's own writer first copies every tensor to host memory, which a
training process near its memory limit cannot afford; this one holds one tensor at a time. Files are read with the library.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final

import torch
from torch import Tensor

from sentinel_agent.contents import is_readable

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
MAX_NAME: Final = 512  # characters of a tensor's name


def storable(tensor: Tensor) -> bool:
    """True if the format has a name for the dtype and the tensor has contents to write."""
    return tensor.dtype in _DTYPES and tensor.layout is torch.strided and is_readable(tensor)


class Names:
    """Gives names that are printable, bounded and unique within one file."""

    def __init__(self) -> None:
        self._taken: set[str] = {"__metadata__"}

    def take(self, wanted: str) -> str:
        """``wanted`` itself wherever possible; otherwise cleaned, with ``~2``, ``~3``, … if taken."""
        clean = "".join(c if c.isprintable() else "_" for c in wanted.encode("utf-8", "replace").decode())[:MAX_NAME]
        name, turn = clean, 1
        while name in self._taken:
            turn += 1
            name = f"{clean}~{turn}"
        self._taken.add(name)
        return name


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Write ``tensors`` (storable ones, with unique names) to a new file of mode 0600, flushed to disk; returns its bytes.

    Raises OSError if it cannot be written, RuntimeError if a tensor cannot be read.
    """
    # As the library does: wide elements first, so that each tensor starts at a multiple of its element size.
    ordered = sorted(tensors, key=lambda named: (-named[1].element_size(), named[0]))
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with new_file(path) as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, tensor in ordered:
            out.write(host_bytes(tensor))
        flush_to_disk(out)
    return 8 + len(encoded) + offset


def new_file(path: Path) -> BinaryIO:
    """A file that did not exist before, for its owner only, open for writing. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def flush_to_disk(out: BinaryIO) -> None:
    """Make what was written survive a crash of the host. Raises OSError."""
    out.flush()
    os.fsync(out.fileno())


def host_bytes(tensor: Tensor) -> memoryview[int]:
    """The elements in row-major order, as bytes in host memory, with every bit as it is (NaN payloads too).

    Not by way of numpy: a storage that numpy has seen can never be resized again, and FSDP frees gathered parameters so.
    Raises RuntimeError for tensor subclasses that have no memory of their own, and for memory that is gone.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if plain.numel() == 0:
        return memoryview(b"")
    if torch._C._dispatch_keys(plain).has(torch._C.DispatchKey.Python):
        raise RuntimeError(f"tensor subclasses such as {type(tensor).__name__} have no bytes of their own")
    storage = plain.untyped_storage()
    start, size = plain.storage_offset() * plain.element_size(), plain.numel() * plain.element_size()
    if storage.nbytes() < start + size or not storage.data_ptr():
        raise RuntimeError("the tensor's memory is gone")
    elements = (ctypes.c_ubyte * size).from_address(storage.data_ptr() + int(start))
    elements.tensor = plain  # type: ignore[attr-defined] # the view below keeps it alive through this
    return memoryview(elements).cast("B")
