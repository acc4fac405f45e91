"""Opening what lies in a bundle without trusting it: checked names, no symlinks, plain files only, nothing outside.

Owns names' rules and the opening of files and directories. What the files mean is in ``manifest.py`` and ``reader.py``.
Every directory is opened relative to the one above it, so a path that is swapped for a symlink meanwhile is refused, not followed.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST_FILE = "manifest.json"
BUNDLES_DIRECTORY = "bundles"
MAX_JSON_BYTES = 64 << 20
MAX_FILES_PER_PART = 256

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_RANK_DIRECTORY = re.compile(r"rank-(\d{5,7})", re.ASCII)
_BUNDLE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: a FIFO must not hang the open


class BundleRefused(ValueError):
    """A bundle, or something in it, that must not be read; the text says what and why, in one line."""


def is_file_name(name: str) -> bool:
    """True for a name that a part's file may have."""
    return _FILE_NAME.fullmatch(name) is not None


def is_bundle_id(name: str) -> bool:
    """True for a name that a bundle's directory may have."""
    return _BUNDLE_ID.fullmatch(name) is not None and ".." not in name


def rank_of_directory(name: str) -> int | None:
    """Rank whose part a directory of this name holds, None if it is not a part's name."""
    match = _RANK_DIRECTORY.fullmatch(name)
    if match is None or name != part_directory(int(match[1])):
        return None
    return int(match[1])


def part_directory(rank: int) -> str:
    """Name of one rank's part inside a bundle."""
    return f"rank-{rank:05d}"


@contextmanager
def open_directory(name: str | Path, within: int | None = None) -> Iterator[int]:
    """Descriptor of a directory that is no symlink. Raises BundleRefused."""
    fd = _open(name, _DIRECTORY_FLAGS, within)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_file(name: str, within: int) -> Iterator[tuple[int, int]]:
    """Descriptor and size (bytes) of a plain file in the directory ``within``. Raises BundleRefused."""
    if not is_file_name(name):
        raise BundleRefused(f"not a file name of a bundle: {printable(name)}")
    fd = _open(name, _FILE_FLAGS, within)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise BundleRefused(f"{name} is not a plain file")
        yield fd, found.st_size
    finally:
        os.close(fd)


def read_json(name: str, within: int, limit: int = MAX_JSON_BYTES) -> bytes:
    """Content of a JSON file. Raises BundleRefused: absent, no plain file, or larger than ``limit`` bytes."""
    with open_file(name, within) as (fd, size):
        if size > limit:
            raise BundleRefused(f"{name} has {size} bytes, more than the {limit} a bundle may have there")
        return read_range(fd, 0, size, name)


def read_range(fd: int, offset: int, length: int, name: str) -> bytes:
    """``length`` bytes from ``offset``. Raises BundleRefused if the file ends before."""
    pieces = []
    while length > 0:
        try:
            piece = os.pread(fd, min(length, 16 << 20), offset)
        except OSError as error:
            raise BundleRefused(f"{name} cannot be read: {error.strerror}") from error
        if not piece:
            raise BundleRefused(f"{name} is truncated")
        pieces.append(piece)
        offset, length = offset + len(piece), length - len(piece)
    return b"".join(pieces)


def digest(name: str, within: int) -> tuple[int, str]:
    """Bytes and SHA-256 (hex) of a plain file. Raises BundleRefused."""
    with open_file(name, within) as (fd, _), os.fdopen(os.dup(fd), "rb") as file:
        try:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return file.tell(), sha256
        except OSError as error:
            raise BundleRefused(f"{name} cannot be read: {error.strerror}") from error


def entries(within: int) -> list[str]:
    """Names in a directory, sorted. Raises BundleRefused."""
    try:
        return sorted(os.listdir(within))
    except OSError as error:
        raise BundleRefused(f"directory cannot be listed: {error.strerror}") from error


def flush_directory(directory: Path) -> None:
    """Make renames and new names inside ``directory`` survive a crash of the host. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def kind_of(name: str, within: int) -> str:
    """``file``, ``directory``, ``symlink``, ``other`` or ``absent``; follows nothing."""
    try:
        mode = os.stat(name, dir_fd=within, follow_symlinks=False).st_mode
    except OSError:
        return "absent"
    for is_kind, kind in ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "symlink")):
        if is_kind(mode):
            return kind
    return "other"


def printable(name: str) -> str:
    """A name fit for one line of an error message."""
    plain = name.isascii() and name.isprintable() and name.strip() == name
    return (name if plain else ascii(name))[:140] or "''"


def _open(name: str | Path, flags: int, within: int | None) -> int:
    try:
        return os.open(name, flags, dir_fd=within)
    except ValueError:
        raise BundleRefused(f"not a path: {printable(str(name))}") from None
    except OSError as error:
        kind = kind_of(str(name), within) if within is not None else ""
        why = "a symlink, which a bundle may not hold" if kind == "symlink" else (error.strerror or str(error))
        raise BundleRefused(f"{printable(str(name))} cannot be opened: {why}") from error
