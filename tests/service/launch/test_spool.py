"""Critical frames on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.launch import spool as spool_module
from sentinel.launch.spool import Spool, read_spool

RECORDS = [(b"envelope-1", b"frame-1"), (b"", b"frame-2" * 1000), (b"envelope-3", b"")]


def test_records_come_back_as_written(tmp_path: Path) -> None:
    """Every record is read back whole and in order, from a file only its owner can read."""
    spool = Spool(tmp_path / "spool", "0-1-x")
    spool.append(RECORDS[:2])
    spool.append(RECORDS[2:])
    spool.close()
    assert list(read_spool(spool.path)) == RECORDS
    assert spool.path.stat().st_mode & 0o777 == 0o600
    assert spool.path.parent.stat().st_mode & 0o777 == 0o700


def test_an_empty_spool_leaves_no_file(tmp_path: Path) -> None:
    """A run whose reports were all acknowledged leaves nothing behind."""
    spool = Spool(tmp_path, "0-1-x")
    spool.append(RECORDS)
    spool.clear()
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_records_after_a_clearing_start_anew(tmp_path: Path) -> None:
    """What was acknowledged does not come back with later records."""
    spool = Spool(tmp_path, "0-1-x")
    spool.append(RECORDS[:2])
    spool.clear()
    spool.append(RECORDS[2:])
    spool.close()
    assert list(read_spool(spool.path)) == RECORDS[2:]


@given(cut=st.integers(min_value=0, max_value=39))
def test_a_torn_tail_is_not_a_record(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A file cut anywhere, as a crash leaves it, yields exactly its whole records."""
    spool = Spool(tmp_path_factory.mktemp("spool"), "0-1-x")
    records = [(b"aa", b"1234"), (b"bb", b"5678"), (b"cc", b"9")]
    spool.append(records)
    spool.close()
    whole = spool.path.read_bytes()
    spool.path.write_bytes(whole[: len(whole) - cut])
    found = list(read_spool(spool.path))
    assert found == records[: len(found)]
    assert len(found) == sum(end <= len(whole) - cut for end in (14, 28, 39))


def test_lengths_that_cannot_be_ours_end_the_reading(tmp_path: Path) -> None:
    """A record that claims gigabytes is not read."""
    path = tmp_path / "x.frames"
    path.write_bytes(b"\xff" * 64)
    assert list(read_spool(path)) == []


def test_a_full_spool_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is bounded; what does not fit raises, and what was there stays."""
    monkeypatch.setattr(spool_module, "MAX_SPOOL_BYTES", 64)
    spool = Spool(tmp_path, "0-1-x")
    spool.append([(b"e", b"f")])
    with pytest.raises(OSError, match="has reached 64 bytes"):
        spool.append([(b"e", b"f" * 64)])
    spool.close()
    assert list(read_spool(spool.path)) == [(b"e", b"f")]


def test_a_write_that_fails_half_way_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a disk error the file ends at its last whole record, so that later records can be read."""
    spool = Spool(tmp_path, "0-1-x")
    spool.append([(b"e1", b"f1")])
    real_fsync = os.fsync

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        spool.append([(b"e2", b"f2")])
    monkeypatch.setattr(os, "fsync", real_fsync)
    spool.append([(b"e3", b"f3")])
    spool.close()
    assert list(read_spool(spool.path)) == [(b"e1", b"f1"), (b"e3", b"f3")]


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    """Somebody's link in the spool's place is refused, not written through."""
    target = tmp_path / "target"
    target.write_bytes(b"keep")
    (tmp_path / "0-1-x.frames").symlink_to(target)
    with pytest.raises(OSError, match="0-1-x"):
        Spool(tmp_path, "0-1-x").append(RECORDS)
    assert target.read_bytes() == b"keep"
