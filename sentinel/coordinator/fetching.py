"""One part of a bundle on its way here from another host, piece by piece.

Owns what to ask for next, how much of it at once, and the files it is written to: below a temporary name until every byte is there.
Knows no sockets and no threads; whoever drives it tells it the time. Believes nothing a peer says about names and sizes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sentinel.bundle.paths import MAX_FILES_PER_PART, flush_directory, is_file_name, part_directory
from sentinel.wire.messages import PartFile, PartPiece
from sentinel.wire.names import BUNDLES

PIECE_BYTES = 64 << 10  # half a second of a 1 Mbit/s link: reports behind it wait no longer
MAX_AHEAD = 32  # pieces asked for and not here yet
QUICK_SECONDS = 0.25  # an answer within it: ask for one more ahead; a later one: for half as many
AGAIN_SECONDS = 5.0  # a piece that takes longer is asked for again: its connection broke
GIVE_UP_SECONDS = 60.0  # without any answer
DISK_SHARE = 0.2  # of what is free here, at most, as with a rank's own part


class FetchFailed(Exception):
    """This part will not come; the text says why in one line."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A piece that is wanted; no ``file`` stands for the list of files, ``done`` for the end of it all."""

    file: str = ""
    offset: int = 0
    length: int = 0
    done: bool = False


@dataclass(slots=True)
class Allowance:
    """Bytes that may still be fetched of one bundle."""

    left: int

    def take(self, size: int) -> bool:
        """True, and they are spent, if ``size`` bytes are left."""
        if size > self.left:
            return False
        self.left -= size
        return True


@dataclass(slots=True)
class _Incoming:
    """A file that is being written: ``left`` bytes are still to come."""

    left: int
    fd: int


@dataclass(slots=True)
class PartFetch:
    """The fetch of rank ``rank``'s part of ``bundle`` into ``root``. ``now`` is monotonic seconds everywhere."""

    root: Path
    bundle: str
    rank: int
    allowance: Allowance
    heard_at: float
    size: int = 0  # bytes of the part, once known
    have: int = 0
    finished: bool = False
    _asked: dict[tuple[str, int], tuple[Asked, float]] = field(default_factory=dict)
    _to_ask: Iterator[Asked] = field(default_factory=lambda: iter((Asked(),)))
    _files: dict[str, _Incoming] = field(default_factory=dict)
    _ahead: float = 1.0
    _listed: bool = False

    def due(self, now: float) -> list[Asked]:
        """What to ask for now. Raises FetchFailed if nobody has answered for long."""
        if now - self.heard_at > GIVE_UP_SECONDS:
            raise FetchFailed(f"no answer for {GIVE_UP_SECONDS:.0f} s")
        late = [asked for asked, at in self._asked.values() if now - at > AGAIN_SECONDS]
        if late:
            self._ahead = 1.0
            return [self._ask(late[0], now)]
        return list(self._more(now))

    def _more(self, now: float) -> Iterator[Asked]:
        while len(self._asked) < int(self._ahead) and (asked := next(self._to_ask, None)) is not None:
            yield self._ask(asked, now)

    def _ask(self, asked: Asked, now: float) -> Asked:
        self._asked[asked.file, asked.offset] = (asked, now)
        return asked

    def take(self, piece: PartPiece, now: float) -> None:
        """Write a piece down; one that was not asked for is left out. Raises FetchFailed, OSError."""
        asked, at = self._asked.pop((piece.file, piece.offset), (None, 0.0))
        if asked is None:
            return
        self.heard_at = now
        if piece.error:
            raise FetchFailed(piece.error)
        self._ahead = min(MAX_AHEAD, self._ahead + 1) if now - at < QUICK_SECONDS else max(1.0, self._ahead / 2)
        if not asked.file:
            self._begin(piece.files)
        elif len(piece.content) != asked.length:
            raise FetchFailed(f"{asked.file} came in a piece of {len(piece.content)} bytes instead of {asked.length}")
        else:
            self._write(asked, piece.content)
        if self._listed and not self._files:
            self._finish()

    def _begin(self, files: tuple[PartFile, ...]) -> None:
        names = {file.name for file in files}
        if not files or len(files) > MAX_FILES_PER_PART or len(names) != len(files):
            raise FetchFailed(f"no part has {len(files)} files")
        if not all(is_file_name(file.name) and file.bytes >= 0 for file in files):
            raise FetchFailed("a file has a name or a size that no part's file has")
        self.size = sum(file.bytes for file in files)
        self._directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.size > DISK_SHARE * shutil.disk_usage(self._directory.parent).free:
            raise FetchFailed(f"{self.size} bytes are more than a fifth of what is free on the coordinator's disk")
        if not self.allowance.take(self.size):
            raise FetchFailed(f"{self.size} bytes are more than may still be fetched of this bundle")
        for left in self._directory.parent.glob(f".{self._directory.name}.fetch-*"):  # by a coordinator that died
            shutil.rmtree(left, ignore_errors=True)
        self._temporary.mkdir(mode=0o700)
        for file in files:
            self._files[file.name] = _Incoming(file.bytes, _new_file(self._temporary / file.name))
        for file in files:
            self._close_if_whole(file.name)
        self._to_ask, self._listed = _pieces(files), True

    def _write(self, asked: Asked, content: bytes) -> None:
        incoming, view, at = self._files[asked.file], memoryview(content), asked.offset
        while view:
            written = os.pwrite(incoming.fd, view, at)
            view, at = view[written:], at + written
        incoming.left -= len(content)
        self.have += len(content)
        self._close_if_whole(asked.file)

    def _close_if_whole(self, name: str) -> None:
        if self._files[name].left == 0:
            fd = self._files.pop(name).fd
            os.fsync(fd)
            os.close(fd)

    def _finish(self) -> None:
        flush_directory(self._temporary)
        if self._directory.exists():  # it came on another way: a shared file system that was slow to show it
            shutil.rmtree(self._temporary)
        else:
            self._temporary.rename(self._directory)
        flush_directory(self._directory.parent)
        self.finished = True

    def abandon(self) -> None:
        """Leave nothing behind of what came."""
        while self._files:
            os.close(self._files.popitem()[1].fd)
        if not self.finished:
            shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def _directory(self) -> Path:
        return self.root / BUNDLES / self.bundle / part_directory(self.rank)

    @property
    def _temporary(self) -> Path:
        return self._directory.with_name(f".{part_directory(self.rank)}.fetch-{os.getpid()}")


def _pieces(files: tuple[PartFile, ...]) -> Iterator[Asked]:
    for file in files:
        for offset in range(0, file.bytes, PIECE_BYTES):
            yield Asked(file.name, offset, min(PIECE_BYTES, file.bytes - offset))


def _new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
