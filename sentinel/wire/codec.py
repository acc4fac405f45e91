"""Bytes of the wire: version byte, batches of reports, signed commands.

Owns encoding, decoding and refusing. Knows no sockets. Every refusal is a ``FrameRefused`` with a reason from ``Refusal``,
so that a hostile or outdated peer is counted, never a crash.

A frame is ``b"S" + PROTOCOL + class`` followed by msgpack. The class byte tells a relay what to spool without decoding.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from sentinel.wire.messages import Command, PartPiece, Report, is_critical

PROTOCOL = 2
MAGIC = b"S"
MAX_FRAME_BYTES = 1 << 20  # the ROUTER's MAXMSGSIZE too
MAX_BATCH = 512  # reports in one frame

CLASS_CRITICAL = b"C"
CLASS_SAMPLE = b"D"
CLASS_COMMAND = b"K"
CLASS_PIECE = b"P"

_reports_encoder = msgspec.msgpack.Encoder()
_reports_decoder = msgspec.msgpack.Decoder(list[Report])
_piece_decoder = msgspec.msgpack.Decoder(PartPiece)
_command_decoder = msgspec.msgpack.Decoder(Command)


class Refusal(StrEnum):
    """Why a frame was refused; these are the label values of ``sentinel_frames_rejected_total``."""

    TOO_SHORT = "too_short"
    NOT_OURS = "not_ours"
    PROTOCOL = "protocol"
    MALFORMED = "malformed"
    OVERSIZE = "oversize"
    BATCH = "batch"
    SIGNATURE = "signature"
    EXPIRED = "expired"
    UNKNOWN_RUN = "unknown_run"


class FrameRefused(ValueError):
    """A frame that must not be acted on. ``reason`` is one of ``Refusal``; the text names what was seen."""

    def __init__(self, reason: Refusal, detail: str = "") -> None:
        super().__init__(f"frame refused ({reason}): {detail}" if detail else f"frame refused ({reason})")
        self.reason = reason


def encode_reports(reports: Sequence[Report]) -> bytes:
    """One frame holding ``reports``, critical if any of them is."""
    kind = CLASS_CRITICAL if any(is_critical(r) for r in reports) else CLASS_SAMPLE
    try:
        body = _reports_encoder.encode(list(reports))
    except UnicodeEncodeError:  # text that UTF-8 cannot hold, such as an exception naming a file in bytes
        body = _reports_encoder.encode([_printable(report) for report in reports])
    return MAGIC + bytes([PROTOCOL]) + kind + body


def frame_class(frame: bytes) -> bytes:
    """The class byte of a frame, after checking magic, protocol and size. Raises FrameRefused."""
    if len(frame) < 4:
        raise FrameRefused(Refusal.TOO_SHORT, f"{len(frame)} bytes")
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameRefused(Refusal.OVERSIZE, f"{len(frame)} bytes")
    if frame[:1] != MAGIC:
        raise FrameRefused(Refusal.NOT_OURS)
    if frame[1] != PROTOCOL:
        raise FrameRefused(Refusal.PROTOCOL, f"peer speaks {frame[1]}, this is {PROTOCOL}")
    return frame[2:3]


def decode_reports(frame: bytes) -> list[Report]:
    """Reports of one frame. Raises FrameRefused for anything but a whole frame of this protocol."""
    if frame_class(frame) not in (CLASS_CRITICAL, CLASS_SAMPLE):
        raise FrameRefused(Refusal.NOT_OURS, "not a report frame")
    try:
        reports = _reports_decoder.decode(frame[3:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameRefused(Refusal.MALFORMED, str(error)[:200]) from error
    if len(reports) > MAX_BATCH:
        raise FrameRefused(Refusal.BATCH, f"{len(reports)} reports")
    return reports


def encode_piece(piece: PartPiece) -> bytes:
    """A frame holding a piece of a bundle's part."""
    return MAGIC + bytes([PROTOCOL]) + CLASS_PIECE + _reports_encoder.encode(piece)


def decode_piece(frame: bytes) -> PartPiece:
    """The piece of a frame. Raises FrameRefused."""
    if frame_class(frame) != CLASS_PIECE:
        raise FrameRefused(Refusal.NOT_OURS, "not a piece of a part")
    try:
        return _piece_decoder.decode(frame[3:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameRefused(Refusal.MALFORMED, str(error)[:200]) from error


def encode_command(command: Command, key: bytes) -> bytes:
    """A command frame: header, 32 bytes HMAC-SHA256 under ``key``, msgpack."""
    body = _reports_encoder.encode(command)
    return MAGIC + bytes([PROTOCOL]) + CLASS_COMMAND + _signature(body, key) + body


def decode_command(frame: bytes, key: bytes, now: float) -> Command:
    """The command of a frame, once signature and expiry hold at ``now`` (unix seconds). Raises FrameRefused."""
    if frame_class(frame) != CLASS_COMMAND:
        raise FrameRefused(Refusal.NOT_OURS, "not a command frame")
    signature, body = frame[3:35], frame[35:]
    if not hmac.compare_digest(signature, _signature(body, key)):
        raise FrameRefused(Refusal.SIGNATURE)
    try:
        command = _command_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameRefused(Refusal.MALFORMED, str(error)[:200]) from error
    if not command.expires_at >= now:  # NaN is no time either
        raise FrameRefused(Refusal.EXPIRED, command.command_id)
    return command


def _printable(report: Report) -> Report:
    """The report with lone surrogates in its texts escaped."""
    texts = {
        name: value.encode("utf-8", "backslashreplace").decode()
        for name in report.__struct_fields__
        if isinstance(value := getattr(report, name), str)
    }
    return msgspec.structs.replace(report, **texts)


def _signature(body: bytes, key: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).digest()
