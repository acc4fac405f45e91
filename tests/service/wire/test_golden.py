"""The bytes of each protocol version, as they were written down when it was released."""

from __future__ import annotations

from typing import Any

import pytest
from service.wire.samples import COMMANDS, GOLDEN, KEY, REPORTS, frames, golden_file, read_golden, sample

from sentinel.wire.codec import PROTOCOL, FrameRefused, Refusal, decode_command, decode_reports, frame_class
from sentinel.wire.link import Envelope, decode_envelope

VERSIONS = sorted(int(path.stem[1:]) for path in GOLDEN.glob("v*.json"))
CHANGED = (
    "the bytes of protocol {} changed: peers of this version would misread each other. "
    "Raise PROTOCOL and run `python -m service.wire.samples` in tests/"
)


def test_this_protocol_is_written_down() -> None:
    """A new protocol comes with its golden file; the files of older ones stay."""
    assert [*range(1, PROTOCOL + 1)] == VERSIONS


def test_frames_are_those_that_were_written_down() -> None:
    """Byte for byte: neither a field, nor its place, nor the framing changed within a protocol version."""
    golden = read_golden(PROTOCOL)
    assert sorted(frames()) == sorted(golden), CHANGED.format(PROTOCOL)
    assert [name for name, frame in frames().items() if frame != golden[name]] == [], CHANGED.format(PROTOCOL)


def test_what_was_written_down_is_understood() -> None:
    """Old bytes give the messages they were made from."""
    golden = read_golden(PROTOCOL)
    assert decode_envelope(golden["envelope"]) == sample(Envelope)
    assert decode_reports(golden["batch"]) == [sample(report) for report in REPORTS]
    for report in REPORTS:
        assert decode_reports(golden[report.__name__]) == [sample(report)]
        assert decode_reports(golden[f"{report.__name__} bare"]) == [sample(report, whole=False)]
    for command in COMMANDS:
        assert decode_command(golden[command.__name__], KEY, now=0.0) == sample(command)


@pytest.mark.parametrize("version", [v for v in VERSIONS if v != PROTOCOL] or [pytest.param(0, id="none yet")])
def test_other_protocols_are_refused_by_name(version: int) -> None:
    """A peer of another version is told apart from noise, so that the operator learns to upgrade it."""
    golden = read_golden(version if golden_file(version).exists() else PROTOCOL)
    frame = golden["batch"][:1] + bytes([version]) + golden["batch"][2:]
    with pytest.raises(FrameRefused, match=f"peer speaks {version}, this is {PROTOCOL}") as refused:
        frame_class(frame)
    assert refused.value.reason is Refusal.PROTOCOL


def test_a_sample_sets_every_field() -> None:
    """The golden bytes would miss a field that no sample sets."""
    messages: tuple[type[Any], ...] = (*REPORTS, *COMMANDS, Envelope)
    for message in messages:
        one = sample(message)
        assert [f for f in one.__struct_fields__ if getattr(one, f) in ((), None, "", 0, False)] == []
