"""Parts of bundles that this node's ranks wrote, handed out piece by piece to a coordinator on another host.

Owns the reading, on a thread of its own: a disk that hangs must not keep reports from leaving. Only files of parts below this
launcher's run directory are ever read, whatever is asked for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from sentinel.bundle.paths import (
    MAX_FILES_PER_PART,
    BundleRefused,
    entries,
    is_file_name,
    open_directory,
    open_file,
    printable,
    read_range,
)
from sentinel.wire.codec import encode_piece
from sentinel.wire.messages import PartFile, PartPiece, PartWanted
from sentinel.wire.names import BUNDLES, bundle_id, rank_directory

MAX_PIECE_BYTES = 512 << 10  # well under the wire's limit of a frame
ASKED_SECONDS = 10.0
"""A coordinator that fetches asks more often than this; after that long a silence it is gone."""
NEXT_SECONDS = 0.5  # it may want another part when it is done with one
ADDRESS = "inproc://sentinel-shelf"


class Shelf:
    """All parts below ``run_dir``. Methods belong to the relay's thread."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._busy_until = 0.0  # monotonic seconds
        self._context = zmq.Context()  # its own: one whose sockets a hanging disk keeps open cannot be ended
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.bind(ADDRESS)
        self._there = self._context.socket(zmq.PAIR)
        self._there.connect(ADDRESS)
        for end in (self.socket, self._there):
            end.linger = 0
            end.rcvhwm = end.sndhwm = 0  # bounded by what the coordinator asks for ahead
        self._thread = threading.Thread(target=self._serve, name="sentinel-shelf", daemon=True)

    def ask(self, wanted: PartWanted) -> None:
        """Read a piece soon; it comes out of ``receive``."""
        self._busy_until = time.monotonic() + (NEXT_SECONDS if wanted.done else ASKED_SECONDS)
        if wanted.done:
            return
        if self._thread.ident is None:
            self._thread.start()
        self.socket.send(msgspec.msgpack.encode(wanted), zmq.NOBLOCK)

    def receive(self) -> Iterator[bytes]:
        """Frames of pieces that were read, without waiting for more."""
        with contextlib.suppress(zmq.Again):
            while True:
                yield self.socket.recv(zmq.NOBLOCK)

    @property
    def busy(self) -> bool:
        """True while a coordinator is fetching. May be read on any thread."""
        return time.monotonic() < self._busy_until

    def close(self) -> None:
        """End the thread; one that a disk holds is left behind."""
        if self._thread.ident is None:
            self._there.close()
        else:
            with contextlib.suppress(zmq.Again):
                self.socket.send(b"", zmq.NOBLOCK)
            self._thread.join(2.0)
        self.socket.close()
        if not self._thread.is_alive():
            self._context.term()

    def _serve(self) -> None:
        with self._there as there:
            while asked := there.recv():
                there.send(encode_piece(piece_of(self._run_dir, msgspec.msgpack.decode(asked, type=PartWanted))))


def piece_of(run_dir: Path, wanted: PartWanted) -> PartPiece:
    """What ``wanted`` asks for, or why it cannot be had. Never raises for what a peer may ask."""
    rank = wanted.ranks[0] if len(wanted.ranks) == 1 else -1
    head = PartPiece(wanted.attempt, wanted.round, rank, wanted.file, wanted.offset)
    try:
        # Opened one below the other, so that none of them can be a symlink to elsewhere.
        with (
            open_directory(run_dir / BUNDLES) as bundles,
            open_directory(bundle_id(wanted.attempt, wanted.round), bundles) as bundle,
            open_directory(rank_directory(rank), bundle) as part,
        ):
            if not wanted.file:
                return msgspec.structs.replace(head, files=_files(part))
            return msgspec.structs.replace(head, content=_read(part, wanted))
    except (BundleRefused, OSError) as refused:
        return msgspec.structs.replace(head, error=printable(str(refused)))


def _files(part: int) -> tuple[PartFile, ...]:
    names = entries(part)
    if len(names) > MAX_FILES_PER_PART or not all(map(is_file_name, names)):
        raise BundleRefused("this part holds files that no part has")
    return tuple(PartFile(name, _size(name, part)) for name in names)


def _size(name: str, part: int) -> int:
    with open_file(name, part) as (_, size):
        return size


def _read(part: int, wanted: PartWanted) -> bytes:
    if not (wanted.offset >= 0 and 0 < wanted.length <= MAX_PIECE_BYTES):
        raise BundleRefused(f"no piece has {wanted.length} bytes from {wanted.offset}")
    with open_file(wanted.file, part) as (fd, _):
        return read_range(fd, wanted.offset, wanted.length, wanted.file)
