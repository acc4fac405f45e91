"""Envelopes, and the join file with its secrets."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.wire.codec import FrameRefused, Refusal
from sentinel.wire.link import Envelope, Join, decode_envelope, encode_envelope

SECRET = "s3cret" + "s" * 34
COMMAND_KEY = "ab" * 32


def join(**changes: str | None) -> Join:
    """A join file's content."""
    fields: dict[str, str | None] = {
        "endpoint": "tcp://10.0.0.1:5555",
        "server_key": "k" * 40,
        "client_public": "p" * 40,
        "client_secret": SECRET,
        "command_key": COMMAND_KEY,
    }
    return Join.model_validate({**fields, **changes})


# --- envelopes -----------------------------------------------------------------------------------------------------------


@given(
    st.builds(
        Envelope,
        run_id=st.text(max_size=60),
        node=st.integers(0, 2**31),
        relay=st.text(max_size=60),
        sequence=st.integers(0, 2**53),
        world_size=st.integers(0, 2**20),
    )
)
def test_an_envelope_comes_back(envelope: Envelope) -> None:
    """Whatever the run is called."""
    assert decode_envelope(encode_envelope(envelope)) == envelope


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (b"", Refusal.MALFORMED),
        (b"\xff\xff", Refusal.MALFORMED),
        (msgspec.msgpack.encode(["run", 0, "relay", 1]), Refusal.MALFORMED),
        (msgspec.msgpack.encode(["run", 0, "relay", 1, 2, "more"]), Refusal.MALFORMED),
        (msgspec.msgpack.encode(["run", "0", "relay", 1, 2]), Refusal.MALFORMED),
        (msgspec.msgpack.encode({"run_id": "run"}), Refusal.MALFORMED),
        (b"\x95\xa1\xff\x00\xa1r\x01\x02", Refusal.MALFORMED),
        (b"\x91" * 1000, Refusal.MALFORMED),
        (encode_envelope(Envelope("r" * 2000, 0, "relay", 1, 2)), Refusal.OVERSIZE),
    ],
    ids=["empty", "noise", "short", "long", "type", "map", "not UTF-8", "nested", "oversize"],
)
def test_what_is_no_envelope_is_refused_by_name(part: bytes, reason: Refusal) -> None:
    """Before anything of the frame behind it is looked at."""
    with pytest.raises(FrameRefused) as refused:
        decode_envelope(part)
    assert refused.value.reason is reason
    assert len(str(refused.value)) < 300


# --- the join file -------------------------------------------------------------------------------------------------------


def test_a_join_file_comes_back(tmp_path: Path) -> None:
    """With and without pages."""
    for one in (join(), join(http="http://10.0.0.1:9000", run_dir="/srv/run")):
        one.write(tmp_path / "join.json")
        assert Join.read(tmp_path / "join.json") == one


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_its_owner_may_read_a_join_file(tmp_path: Path, umask: int) -> None:
    """Whatever the umask, and also where a readable file was before."""
    path = tmp_path / "join.json"
    path.write_text("old")
    path.chmod(0o644)
    before = os.umask(umask)
    try:
        join().write(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_join_file_is_never_seen_half_written(tmp_path: Path) -> None:
    """A launcher that reads while the coordinator writes gets one of the two contents, whole."""
    path, stop = tmp_path / "join.json", threading.Event()
    contents = [join(endpoint=f"tcp://10.0.0.{i}:5555", run_dir="/srv/" + "x" * 5000 * i) for i in (1, 2)]
    contents[0].write(path)

    def rewrite() -> None:
        while not stop.is_set():
            for one in contents:
                one.write(path)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        seen = {Join.read(path).endpoint for _ in range(300)}
    finally:
        stop.set()
        writer.join(10.0)
    assert seen <= {one.endpoint for one in contents}
    assert [p.name for p in tmp_path.iterdir()] == ["join.json"]


def test_a_join_file_does_not_write_through_a_link(tmp_path: Path) -> None:
    """The link is replaced; what it pointed at stays as it was."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("untouched")
    (tmp_path / "join.json").symlink_to(elsewhere)
    join().write(tmp_path / "join.json")
    assert elsewhere.read_text() == "untouched"
    assert not (tmp_path / "join.json").is_symlink()


def test_secrets_are_not_shown() -> None:
    """A log line or a traceback may hold the object, never its secrets."""
    shown = repr(join()) + str(join())
    assert SECRET not in shown
    assert COMMAND_KEY not in shown


WRONG = [
    ("", "empty"),
    ("{", "not JSON"),
    ("[]", "not an object"),
    ("null", "null"),
    (json.dumps({"endpoint": "tcp://a:1"}), "fields missing"),
    (json.dumps({**json.loads(join().model_dump_json()), "surprise": 1}), "unknown field"),
    (json.dumps({**json.loads(join().model_dump_json()), "server_key": "short"}), "short key"),
    (json.dumps({**json.loads(join().model_dump_json()), "client_secret": SECRET + "x"}), "long secret"),
]


@pytest.mark.parametrize("content", [content for content, _ in WRONG], ids=[name for _, name in WRONG])
def test_what_is_no_join_file_is_said_in_one_line(tmp_path: Path, content: str) -> None:
    """The line names the file and gives no secret away."""
    path = tmp_path / "join.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="is not a join file") as error:
        Join.read(path)
    text = str(error.value)
    assert str(path) in text
    assert "\n" not in text
    assert SECRET not in text


def test_bytes_that_are_no_text_are_no_join_file(tmp_path: Path) -> None:
    """Also one line."""
    (tmp_path / "join.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a join file"):
        Join.read(tmp_path / "join.json")


def test_a_join_file_that_is_not_there_is_an_oserror(tmp_path: Path) -> None:
    """The caller says which flag named it."""
    with pytest.raises(FileNotFoundError):
        Join.read(tmp_path / "join.json")


def test_the_line_names_the_field_that_is_wrong(tmp_path: Path) -> None:
    """'1 validation error' helps nobody."""
    path = tmp_path / "join.json"
    path.write_text(json.dumps({**json.loads(join().model_dump_json()), "server_key": "short"}))
    with pytest.raises(ValueError, match="server_key"):
        Join.read(path)


def test_a_leftover_of_a_killed_writer_does_not_stop_the_next(tmp_path: Path) -> None:
    """In a container a restarted launcher often has the same process id."""
    (tmp_path / f".join.json.{os.getpid()}").write_text("half")
    join().write(tmp_path / "join.json")
    assert Join.read(tmp_path / "join.json") == join()


def test_a_failed_write_leaves_no_secret_behind(tmp_path: Path) -> None:
    """The destination is a directory: an error, and no file with the keys in it."""
    (tmp_path / "join.json").mkdir()
    with pytest.raises(OSError, match=r"join\.json"):
        join().write(tmp_path / "join.json")
    assert [p.name for p in tmp_path.iterdir()] == ["join.json"]


def test_a_command_key_is_hex() -> None:
    """Otherwise the error comes later, in every rank."""
    with pytest.raises(ValueError, match="command_key"):
        join(command_key="not hex, but thirty-two characters long")
