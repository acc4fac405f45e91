"""Critical frames on disk until a coordinator has acknowledged all of them: one append-only file per relay process.

Owns the file's layout and its reading. Which frames are critical, and when they are acknowledged, is the relay's business.

A record is two big-endian lengths (4 bytes each), the envelope and the frame. A torn last record, as a crash leaves it, is
not a record.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

SUFFIX = ".frames"
MAX_SPOOL_BYTES = 256 << 20
_LENGTHS = struct.Struct(">II")


class Spool:
    """The file of one relay. It is made with the first record, emptied once nothing in it is needed, and removed empty."""

    def __init__(self, directory: Path, relay: str) -> None:
        self.path = directory / f"{relay}{SUFFIX}"
        self._fd: int | None = None
        self._bytes = 0

    def append(self, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Write ``(envelope, frame)`` records and fsync once. Raises OSError; then none of them counts as written."""
        block = b"".join(_LENGTHS.pack(len(e), len(f)) + e + f for e, f in records)
        if self._bytes + len(block) > MAX_SPOOL_BYTES:
            raise OSError(f"spool {self.path.name} has reached {MAX_SPOOL_BYTES} bytes")
        fd = self._open()
        try:
            _write_all(fd, block)
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, self._bytes)  # a half-written record would hide the ones after it
            raise
        self._bytes += len(block)

    def clear(self) -> None:
        """Everything was acknowledged: nothing in the file is needed any more. Raises OSError."""
        if self._fd is not None and self._bytes:
            os.ftruncate(self._fd, 0)
            self._bytes = 0

    def close(self) -> None:
        """Close the file; it stays only if it still holds something. Raises OSError."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            if not self._bytes:
                self.path.unlink(missing_ok=True)

    def _open(self) -> int:
        if self._fd is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self.path, flags, 0o600)
            self._bytes = os.fstat(self._fd).st_size
        return self._fd


def read_spool(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """``(envelope, frame)`` of every whole record, in the order written. Raises OSError."""
    with path.open("rb") as spooled:
        while len(header := spooled.read(_LENGTHS.size)) == _LENGTHS.size:
            envelope_bytes, frame_bytes = _LENGTHS.unpack(header)
            if envelope_bytes + frame_bytes > MAX_SPOOL_BYTES:
                return
            envelope, frame = spooled.read(envelope_bytes), spooled.read(frame_bytes)
            if len(envelope) < envelope_bytes or len(frame) < frame_bytes:
                return
            yield envelope, frame


def _write_all(fd: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(fd, view) :]
