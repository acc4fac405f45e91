"""A part comes from another host whole or not at all, whatever its relay sends and however slow its link is."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from sentinel.coordinator import fetching
from sentinel.coordinator.fetching import (
    AGAIN_SECONDS,
    GIVE_UP_SECONDS,
    MAX_AHEAD,
    PIECE_BYTES,
    Allowance,
    Asked,
    FetchFailed,
    PartFetch,
)
from sentinel.launch.shelf import piece_of
from sentinel.wire.messages import PartFile, PartPiece, PartWanted

BUNDLE = "a0-r000007"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A run directory on the other host, with rank 1's part in it: a file of several pieces, a small and an empty one."""
    part = tmp_path / "there/bundles" / BUNDLE / "rank-00001"
    part.mkdir(parents=True)
    (part / "parameters.safetensors").write_bytes(random.Random(7).randbytes(3 * PIECE_BYTES + 17))
    (part / "part.json").write_bytes(b"{}")
    (part / "rng.safetensors").write_bytes(b"")
    return tmp_path / "there"


def begin(tmp_path: Path, *, allowed: int = 1 << 30) -> PartFetch:
    """A fetch of rank 1's part that begins at second 0."""
    return PartFetch(tmp_path / "here", BUNDLE, 1, Allowance(allowed), heard_at=0.0)


def answer(there: Path, asked: Asked) -> PartPiece:
    """What the other host's relay answers."""
    return piece_of(there, PartWanted("id", 0.0, 0, 7, (1,), asked.file, asked.offset, asked.length))


def files(root: Path) -> dict[str, bytes]:
    """Name -> content of all files of the bundle's parts, temporary ones too."""
    bundle = root / "bundles" / BUNDLE
    return {str(p.relative_to(bundle)): p.read_bytes() for p in sorted(bundle.rglob("*")) if p.is_file()}


def test_a_part_comes_bit_by_bit(tmp_path: Path, there: Path) -> None:
    """Pieces in any order, some lost and asked for again, some twice: the part is the same, private, and under its name at once."""
    seed = time.time_ns() % 2**31
    print(f"seed {seed}")
    draw, fetch, now = random.Random(seed), begin(tmp_path), 0.0
    waiting: list[Asked] = []
    while not fetch.finished:
        waiting += fetch.due(now)
        draw.shuffle(waiting)
        now += draw.choice((0.01, 0.01, AGAIN_SECONDS + 0.1))
        if waiting and draw.random() < 0.8:
            asked = waiting.pop()
            for _ in range(draw.choice((1, 2))):
                if not fetch.finished:
                    fetch.take(answer(there, asked), now)
    assert files(tmp_path / "here") == files(there)
    modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "here/bundles" / BUNDLE).rglob("*") if p.is_file()}
    assert modes == {0o600}


def test_nothing_is_there_before_everything_is(tmp_path: Path, there: Path) -> None:
    """Until the last byte no directory has the part's name, and one that is given up leaves nothing."""
    fetch, now = begin(tmp_path), 0.0
    (listing,) = fetch.due(now)
    fetch.take(answer(there, listing), now)
    fetch.take(answer(there, fetch.due(now)[0]), now)
    assert [p.name for p in (tmp_path / "here/bundles" / BUNDLE).iterdir()] == [f".rank-00001.fetch-{os.getpid()}"]
    fetch.abandon()
    assert list((tmp_path / "here/bundles" / BUNDLE).iterdir()) == []


def test_what_a_coordinator_that_died_left_goes(tmp_path: Path, there: Path) -> None:
    """A fetch begins anew, and takes away what one of an earlier process left of the same part."""
    old = tmp_path / "here/bundles" / BUNDLE / ".rank-00001.fetch-1"
    old.mkdir(parents=True)
    (old / "parameters.safetensors").write_bytes(b"half")
    fetch = begin(tmp_path)
    while not fetch.finished:
        for asked in fetch.due(0.0):
            fetch.take(answer(there, asked), 0.0)
    assert files(tmp_path / "here") == files(there)


def test_a_fast_link_is_filled_and_a_slow_one_is_not(tmp_path: Path, there: Path) -> None:
    """While answers are quick more is asked for ahead, up to a bound; one slow answer halves it, a lost one begins again at one."""
    big = there / "bundles" / BUNDLE / "rank-00001/parameters.safetensors"
    big.write_bytes(bytes(200 * PIECE_BYTES))
    fetch, now, most = begin(tmp_path), 0.0, 0
    waiting = fetch.due(now)
    for _ in range(80):
        now += 0.001
        fetch.take(answer(there, waiting.pop(0)), now)
        waiting += fetch.due(now)
        most = max(most, len(waiting))
    assert most == MAX_AHEAD
    now += 1.0
    for _ in range(8):
        fetch.take(answer(there, waiting.pop(0)), now)
    assert fetch.due(now) == []
    assert len(fetch.due(now + AGAIN_SECONDS + 0.1)) == 1


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda p: msgspec.structs.replace(p, error="it is gone"), "it is gone"),
        (lambda p: msgspec.structs.replace(p, files=()), "no part has 0 files"),
        (lambda p: msgspec.structs.replace(p, files=(PartFile("../../evil", 1),)), "a name or a size"),
        (lambda p: msgspec.structs.replace(p, files=(PartFile("a", -1),)), "a name or a size"),
        (lambda p: msgspec.structs.replace(p, files=(PartFile("a", 1), PartFile("a", 1))), "no part has 2 files"),
        (lambda p: msgspec.structs.replace(p, files=(PartFile("a", 1 << 60),)), "free on the coordinator's disk"),
        (lambda p: msgspec.structs.replace(p, files=(PartFile("a", 5000),)), "may still be fetched"),
    ],
)
def test_a_listing_that_no_part_has_is_refused(
    tmp_path: Path, there: Path, spoil: Callable[[PartPiece], PartPiece], why: str
) -> None:
    """Names that lead elsewhere, sizes that do not fit and errors end the fetch with the reason; nothing is written."""
    fetch = begin(tmp_path, allowed=4096)
    (listing,) = fetch.due(0.0)
    with pytest.raises(FetchFailed, match=why):
        fetch.take(spoil(answer(there, listing)), 0.0)
    fetch.abandon()
    assert not (tmp_path / "here").exists() or files(tmp_path / "here") == {}


def test_a_piece_of_another_length_is_refused(tmp_path: Path, there: Path) -> None:
    """More or less than was asked for is no piece."""
    fetch = begin(tmp_path)
    (listing,) = fetch.due(0.0)
    fetch.take(answer(there, listing), 0.0)
    piece = answer(there, fetch.due(0.0)[0])
    with pytest.raises(FetchFailed, match="instead of"):
        fetch.take(msgspec.structs.replace(piece, content=piece.content + b"x"), 0.0)


def test_pieces_nobody_asked_for_are_left_out(tmp_path: Path, there: Path) -> None:
    """A peer cannot write where and when it likes."""
    fetch = begin(tmp_path)
    (listing,) = fetch.due(0.0)
    fetch.take(PartPiece(0, 7, 1, "part.json", 0, b"evil"), 0.0)
    fetch.take(answer(there, listing), 0.0)
    fetch.take(PartPiece(0, 7, 1, "parameters.safetensors", 2 * PIECE_BYTES, bytes(PIECE_BYTES)), 0.0)
    assert fetch.have == 0


def test_a_node_that_is_gone_is_given_up(tmp_path: Path) -> None:
    """Without an answer the request is repeated, and after a minute the fetch fails."""
    fetch = begin(tmp_path)
    assert fetch.due(0.0) == fetch.due(AGAIN_SECONDS + 0.1) == [Asked()]
    with pytest.raises(FetchFailed, match="no answer"):
        fetch.due(GIVE_UP_SECONDS + 0.1)


def test_a_full_disk_ends_the_fetch(tmp_path: Path, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the disk is the caller's to tell; nothing stays."""
    fetch = begin(tmp_path)
    (listing,) = fetch.due(0.0)
    fetch.take(answer(there, listing), 0.0)

    def full(fd: int, content: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetching.os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        fetch.take(answer(there, fetch.due(0.0)[0]), 0.0)
    fetch.abandon()
    assert files(tmp_path / "here") == {}
