"""A relay hands out pieces of its own ranks' parts, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel.launch.relay import Relay, RelayIdentity
from sentinel.launch.shelf import MAX_PIECE_BYTES, Shelf, piece_of
from sentinel.wire.codec import CLASS_PIECE, decode_piece, encode_command, frame_class
from sentinel.wire.link import PART_COMMAND
from sentinel.wire.messages import PartFile, PartWanted

NEVER = 4e9  # unix seconds


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with one part, and secrets around it."""
    part = tmp_path / "run/bundles/a0-r000007/rank-00001"
    part.mkdir(parents=True)
    (part / "part.json").write_bytes(b"0123456789")
    (tmp_path / "run/join.json").write_text("secret")
    (part.parent / "secret").write_text("secret")
    return tmp_path / "run"


@pytest.fixture
def shelf(run_dir: Path) -> Iterator[Shelf]:
    """A shelf of that directory."""
    shelf = Shelf(run_dir)
    yield shelf
    shelf.close()


def wanted(file: str = "part.json", offset: int = 0, length: int = 10, rank: int = 1, round_: int = 7) -> PartWanted:
    """A request for a piece of rank 1's part of round 7, unless it says otherwise."""
    return PartWanted("id", NEVER, 0, round_, (rank,), file, offset, length)


def test_the_files_of_a_part_and_their_pieces(run_dir: Path) -> None:
    """Without a file's name all files are listed; with one, exactly the bytes that were asked for come."""
    assert piece_of(run_dir, wanted("")).files == (PartFile("part.json", 10),)
    assert piece_of(run_dir, wanted(offset=3, length=4)).content == b"3456"


@pytest.mark.parametrize(
    "hostile",
    [
        wanted("../secret"),
        wanted("../../../join.json"),
        wanted("/etc/passwd"),
        wanted("link"),
        wanted("nothing.json"),
        wanted(offset=-1),
        wanted(offset=8, length=5),
        wanted(length=0),
        wanted(length=MAX_PIECE_BYTES + 1),
        wanted(rank=2),
        wanted(rank=-1),
        wanted(round_=-7),
        wanted("", round_=8),
        PartWanted("id", NEVER, 0, 7, (), "part.json", 0, 10),
        PartWanted("id", NEVER, 0, 7, (1, 2), "part.json", 0, 10),
    ],
    ids=str,
)
def test_nothing_but_files_of_parts_is_read(run_dir: Path, hostile: PartWanted) -> None:
    """Paths that lead out, symlinks, other ranks' parts and pieces past the end get one line and no bytes."""
    (run_dir / "bundles/a0-r000007/rank-00001/link").symlink_to(run_dir / "join.json")
    piece = piece_of(run_dir, hostile)
    assert piece.error
    assert "\n" not in piece.error
    assert (piece.content, piece.files) == (b"", ())


def test_a_part_that_is_a_symlink_is_not_followed(run_dir: Path, tmp_path: Path) -> None:
    """A directory that was swapped for a link to elsewhere is refused."""
    part = run_dir / "bundles/a0-r000007/rank-00001"
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    assert "symlink" in piece_of(run_dir, wanted()).error


def test_a_shelf_is_busy_while_it_is_asked(shelf: Shelf, wait) -> None:
    """From the first request until a moment after the last part is done with; never without a request."""
    assert not shelf.busy
    shelf.ask(wanted())
    assert shelf.socket.poll(5000)
    assert [decode_piece(frame).content for frame in shelf.receive()] == [b"0123456789"]
    assert shelf.busy
    shelf.ask(PartWanted("id", NEVER, 0, 7, (1,), done=True))
    wait(lambda: not shelf.busy)


def test_a_relay_answers_what_its_coordinator_signed(coordinator, run_dir) -> None:
    """A request signed with the job's key is answered over the same connection; one with another key is not."""
    relay = Relay(RelayIdentity("run-1", 2, 4), coordinator.join, run_dir).start()
    relay.node_ended(0)
    envelope, _ = coordinator.receive()
    coordinator.acknowledge(envelope)
    coordinator.answer(PART_COMMAND, encode_command(wanted(length=4), b"another key"))
    coordinator.answer(PART_COMMAND, encode_command(wanted(), bytes.fromhex(coordinator.join.command_key)))
    pieces = []
    while not pieces:
        assert coordinator.router.poll(5000)
        *_, frame = coordinator.router.recv_multipart()
        if frame_class(frame) == CLASS_PIECE:
            pieces.append(decode_piece(frame).content)
    assert pieces == [b"0123456789"]
    assert relay.lending
    relay.stop()
