"""Frames: what goes in comes out, and everything else is refused for a named reason."""

from __future__ import annotations

import hmac
import math
import random
import types
import typing
from enum import EnumType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.wire.samples import COMMANDS, KEY, REPORTS, frames, sample

from sentinel.wire import messages
from sentinel.wire.codec import (
    CLASS_COMMAND,
    CLASS_CRITICAL,
    CLASS_SAMPLE,
    MAGIC,
    MAX_BATCH,
    MAX_FRAME_BYTES,
    PROTOCOL,
    FrameRefused,
    Refusal,
    decode_command,
    decode_piece,
    decode_reports,
    encode_command,
    encode_piece,
    encode_reports,
    frame_class,
)
from sentinel.wire.link import decode_envelope
from sentinel.wire.messages import Disabled, Evidence, Goodbye, PartPiece, Report, RoundClosed, is_critical

HEAD = MAGIC + bytes([PROTOCOL])
MUTATIONS = 20_000


def any_of(hint: Any) -> st.SearchStrategy[Any]:
    """Every value that a field of this type can hold on the wire."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return st.one_of(*(any_of(one) for one in arguments))
    if origin is tuple:
        return st.lists(any_of(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(any_of(arguments[0]), any_of(arguments[1]), max_size=3)
    if isinstance(hint, EnumType):
        return st.sampled_from(list(hint))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = typing.get_type_hints(hint, vars(messages))
        return st.builds(hint, *(any_of(hints[name]) for name in hint.__struct_fields__))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(),
        str: st.text(max_size=20),
        type(None): st.none(),
    }
    return simple[hint]


def refusal(frame: bytes) -> Refusal:
    """The reason for which a report frame is refused."""
    with pytest.raises(FrameRefused) as refused:
        decode_reports(frame)
    assert str(refused.value.reason) in str(refused.value)
    return refused.value.reason


# --- round trips ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", REPORTS, ids=lambda m: m.__name__)
def test_every_report_comes_back(message: type[Report]) -> None:
    """Any value of any field survives, NaN and infinities included, and so does the type."""

    @given(any_of(message))
    @settings(max_examples=40, deadline=None, print_blob=True)
    def comes_back(report: Report) -> None:
        (back,) = decode_reports(encode_reports([report]))
        assert type(back) is message
        assert repr(back) == repr(report)

    comes_back()


@pytest.mark.parametrize("message", COMMANDS, ids=lambda m: m.__name__)
def test_every_command_comes_back(message: type[Any]) -> None:
    """The same under a signature."""

    @given(any_of(message).filter(lambda command: not math.isnan(command.expires_at)))
    @settings(max_examples=40, deadline=None, print_blob=True)
    def comes_back(command: Any) -> None:
        assert repr(decode_command(encode_command(command, KEY), KEY, now=-math.inf)) == repr(command)

    comes_back()


def test_a_piece_comes_back() -> None:
    """What is read back from a piece's frame equals what was written; other frames are no pieces."""
    piece = sample(PartPiece)
    assert decode_piece(encode_piece(piece)) == piece
    with pytest.raises(FrameRefused, match="not a piece"):
        decode_piece(encode_reports([sample(REPORTS[0])]))
    with pytest.raises(FrameRefused, match="malformed"):
        decode_piece(encode_piece(piece)[:-1])


@given(st.lists(st.one_of(*(any_of(message) for message in REPORTS)), max_size=20))
@settings(max_examples=30, deadline=None, print_blob=True)
def test_batches_keep_their_order(batch: list[Report]) -> None:
    """Reports of one frame come out as they went in."""
    assert repr(decode_reports(encode_reports(batch))) == repr(batch)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_numbers_stay_what_they_are(value: float) -> None:
    """The loss that we are here for is neither null nor an error."""
    (back,) = decode_reports(encode_reports([msgspec.structs.replace(sample(Evidence), value=value)]))
    assert isinstance(back, Evidence)
    assert str(back.value) == str(value)


# --- classes -------------------------------------------------------------------------------------------------------------


def test_a_frame_is_critical_if_any_report_is() -> None:
    """A relay spools by the class byte alone."""
    healthy = sample(RoundClosed, whole=False)
    healthy = msgspec.structs.replace(healthy, evidence=0)
    assert frame_class(encode_reports([healthy])) == CLASS_SAMPLE
    assert frame_class(encode_reports([healthy, sample(Goodbye)])) == CLASS_CRITICAL
    assert frame_class(encode_command(sample(COMMANDS[0]), KEY)) == CLASS_COMMAND


@pytest.mark.parametrize(
    ("changes", "critical"),
    [
        ({}, False),
        ({"evidence": 1}, True),
        ({"skipped": True}, True),
        ({"params_nonfinite": True}, True),
        ({"buffers_nonfinite": True}, True),
        ({"params_nonfinite": False, "buffers_nonfinite": False}, False),
        ({"loss": math.nan}, False),
    ],
)
def test_a_round_is_critical_if_losing_it_could_lose_an_incident(changes: dict[str, Any], critical: bool) -> None:
    """A healthy round is a sample. A nonfinite loss has evidence of its own, which is critical."""
    healthy = msgspec.structs.replace(sample(RoundClosed, whole=False), evidence=0)
    assert is_critical(msgspec.structs.replace(healthy, **changes)) is critical


def test_of_the_others_what_tells_of_a_fault_is_critical() -> None:
    """Evidence and ends are; a hello and totals are said again."""
    names = {message.__name__ for message in REPORTS if message is not RoundClosed and is_critical(sample(message))}
    assert names == {"Evidence", "PartWritten", "Disabled", "Goodbye", "NodeEnded"}


# --- refusals ------------------------------------------------------------------------------------------------------------

WHOLE = encode_reports([sample(Goodbye)])
REFUSED = [
    (b"", Refusal.TOO_SHORT),
    (WHOLE[:3], Refusal.TOO_SHORT),
    (b"X" + WHOLE[1:], Refusal.NOT_OURS),
    (HEAD + b"Z" + WHOLE[3:], Refusal.NOT_OURS),
    (encode_command(sample(COMMANDS[0]), KEY), Refusal.NOT_OURS),
    (MAGIC + bytes([PROTOCOL + 1]) + WHOLE[2:], Refusal.PROTOCOL),
    (WHOLE[:-1], Refusal.MALFORMED),
    (WHOLE + b"\x00", Refusal.MALFORMED),
    (HEAD + CLASS_SAMPLE + b"\xc1", Refusal.MALFORMED),
    (HEAD + CLASS_SAMPLE + msgspec.msgpack.encode([["unheard", 1]]), Refusal.MALFORMED),
    (HEAD + CLASS_SAMPLE + msgspec.msgpack.encode([["disabled", 0, 1, "why", "more"]]), Refusal.MALFORMED),
    (HEAD + CLASS_SAMPLE + msgspec.msgpack.encode([["disabled", 0, 1]]), Refusal.MALFORMED),
    (HEAD + CLASS_SAMPLE + msgspec.msgpack.encode([["disabled", 0, "1", "why"]]), Refusal.MALFORMED),
    (HEAD + CLASS_SAMPLE + b"\x91\x94\xa8disabled\x00\x01\xa1\xff", Refusal.MALFORMED),
    (HEAD + CLASS_SAMPLE + b"\x91" * 100_000, Refusal.MALFORMED),
    (HEAD + CLASS_SAMPLE + b"\xdd\xff\xff\xff\xff", Refusal.MALFORMED),
    (HEAD + CLASS_SAMPLE + b"\xdd\xff\xff\xff\xff" + WHOLE[4:], Refusal.MALFORMED),
    (HEAD + CLASS_SAMPLE + b"\x00" * MAX_FRAME_BYTES, Refusal.OVERSIZE),
    (encode_reports([Disabled(0, 0, "")] * (MAX_BATCH + 1)), Refusal.BATCH),
]
REFUSED_IDS = [
    "nothing",
    "a header alone",
    "another program's",
    "an unknown class",
    "a command where reports belong",
    "a later protocol",
    "cut short",
    "bytes behind the end",
    "a byte msgpack does not use",
    "an unknown message",
    "an unknown field",
    "a field missing",
    "a field of another type",
    "text that is not UTF-8",
    "nested without end",
    "four billion reports announced, none there",
    "four billion reports announced, one there",
    "oversize",
    "too many reports",
]


@pytest.mark.parametrize(("frame", "reason"), REFUSED, ids=REFUSED_IDS)
def test_what_is_no_frame_of_ours_is_refused_by_name(frame: bytes, reason: Refusal) -> None:
    """Never a crash, and the reason is the one an operator can act on."""
    assert refusal(frame) is reason


def test_the_largest_batch_and_an_empty_one_are_taken() -> None:
    """The limits themselves are within the limits."""
    assert len(decode_reports(encode_reports([Disabled(0, 0, "")] * MAX_BATCH))) == MAX_BATCH
    assert decode_reports(encode_reports([])) == []


def test_a_refusal_is_one_short_line() -> None:
    """What a peer sent never floods the log."""
    for frame, _ in REFUSED:
        with pytest.raises(FrameRefused) as refused:
            decode_reports(frame)
        text = str(refused.value)
        assert len(text) < 300
        assert text.isprintable()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda frame: WHOLE, Refusal.NOT_OURS),
        (lambda frame: frame[:3] + bytes(32) + frame[35:], Refusal.SIGNATURE),
        (lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]), Refusal.SIGNATURE),
        (lambda frame: frame[:20], Refusal.SIGNATURE),
        (lambda frame: frame + b"\x00", Refusal.SIGNATURE),
        (lambda frame: frame[:35], Refusal.SIGNATURE),
    ],
    ids=["reports", "no signature", "a changed body", "cut within the signature", "a longer body", "no body"],
)
def test_a_command_that_was_not_signed_as_it_is_is_refused(spoil: Any, reason: Refusal) -> None:
    """Nobody without the key can make ranks write or leave."""
    frame = spoil(encode_command(sample(COMMANDS[0]), KEY))
    with pytest.raises(FrameRefused) as refused:
        decode_command(frame, KEY, now=0.0)
    assert refused.value.reason is reason


def test_a_command_under_another_key_is_refused() -> None:
    """Each run has its own."""
    with pytest.raises(FrameRefused, match="signature"):
        decode_command(encode_command(sample(COMMANDS[0]), KEY), bytes(32), now=0.0)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.__name__)
def test_a_command_expires(command: type[Any]) -> None:
    """Replayed after its time it does nothing; at its time it still holds."""
    frame = encode_command(msgspec.structs.replace(sample(command), expires_at=100.0), KEY)
    assert decode_command(frame, KEY, now=100.0).expires_at == 100.0
    with pytest.raises(FrameRefused) as refused:
        decode_command(frame, KEY, now=100.001)
    assert refused.value.reason is Refusal.EXPIRED


def test_a_signed_body_that_is_no_command_is_refused() -> None:
    """A later coordinator may know commands that this rank does not."""
    body = msgspec.msgpack.encode(["fly", "id", 1.0])
    frame = encode_command(sample(COMMANDS[0]), KEY)
    signed = frame[:3] + hmac.digest(KEY, body, "sha256") + body
    with pytest.raises(FrameRefused) as refused:
        decode_command(signed, KEY, now=0.0)
    assert refused.value.reason is Refusal.MALFORMED


def test_every_reason_is_reached_here_but_the_servers_own() -> None:
    """Which runs are known is the coordinator's business; its tests reach that one."""
    reached = {reason for _, reason in REFUSED} | {Refusal.SIGNATURE, Refusal.EXPIRED}
    assert set(Refusal) - reached == {Refusal.UNKNOWN_RUN}


# --- hostile frames ------------------------------------------------------------------------------------------------------


def mutated(frame: bytes, dice: random.Random) -> bytes:
    """The frame with a few bytes changed, cut out, doubled or put in; mostly behind the header, where decoding begins."""
    changed = bytearray(frame)
    for _ in range(dice.randint(1, 4)):
        at = dice.randint(3 if dice.random() < 0.9 else 0, max(len(changed), 3))
        match dice.randrange(4):
            case 0 if at < len(changed):
                changed[at] = dice.randrange(256)
            case 1:
                del changed[at : at + dice.randint(1, 8)]
            case 2:
                changed[at:at] = bytes(dice.choices(range(256), k=dice.randint(1, 8)))
            case _:
                changed[at:at] = changed[dice.randint(0, at) : at]
    return bytes(changed[: MAX_FRAME_BYTES + 1])


def test_mutated_frames_are_refused_or_whole() -> None:
    """Whatever noise does to a frame, decoding gives reports of ours or FrameRefused, and nothing else."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice, originals, whole = random.Random(seed), list(frames().items()), 0
    for _ in range(MUTATIONS):
        name, frame = dice.choice(originals)
        attempt = mutated(frame, dice)
        try:
            if name == "envelope":
                decode_envelope(attempt)
            elif name.split()[0] in {command.__name__ for command in COMMANDS}:
                decode_command(attempt, KEY, now=0.0)
            else:
                whole += all(isinstance(report, REPORTS) for report in decode_reports(attempt))
        except FrameRefused as refused:
            assert isinstance(refused.reason, Refusal)  # noqa: PT017
    assert whole > 0, "every mutation was refused: the mutations do not get past the header"


def test_no_mutation_of_a_command_is_obeyed() -> None:
    """One changed bit anywhere and the signature does not hold."""
    frame = encode_command(sample(COMMANDS[0]), KEY)
    for at in range(len(frame)):
        for bit in range(8):
            spoilt = frame[:at] + bytes([frame[at] ^ (1 << bit)]) + frame[at + 1 :]
            with pytest.raises(FrameRefused):
                decode_command(spoilt, KEY, now=0.0)


def test_text_that_utf8_cannot_hold_is_sent_all_the_same() -> None:
    """An exception's text may hold a surrogate (a file name in bytes); the evidence must go out with it."""
    (back,) = decode_reports(encode_reports([Disabled(0, 1, "cannot open \udcff.bin")]))
    assert isinstance(back, Disabled)
    assert back.reason.startswith("cannot open")


def test_a_command_that_expires_at_no_time_is_refused() -> None:
    """The expiry must be a time."""
    frame = encode_command(msgspec.structs.replace(sample(COMMANDS[0]), expires_at=math.nan), KEY)
    with pytest.raises(FrameRefused):
        decode_command(frame, KEY, now=1e12)
