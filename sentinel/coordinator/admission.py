"""What may come in: a message off the ROUTER becomes an ``Inbound``, or is turned away for a named reason.

Owns the checks of shape, identity and bounds. Believes nothing a peer says about itself but its CURVE key.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum

import zmq

from sentinel.wire.codec import CLASS_CRITICAL, CLASS_PIECE, FrameRefused, Refusal, decode_piece, decode_reports
from sentinel.wire.link import Envelope, decode_envelope
from sentinel.wire.messages import Hello, NodeEnded, PartPiece, Report, is_critical

MAX_WORLD_SIZE = 1 << 17
MAX_COUNTER = 1 << 53  # rounds, steps, sequences: beyond it a JSON reader would round
MAX_NAME_CHARACTERS = 256


class Rejection(StrEnum):
    """Why a whole message was turned away, beside the frame's own ``codec.Refusal``."""

    PARTS = "parts"  # not envelope + frame
    REVOKED = "revoked"  # its key is not allowed any more
    IDENTITY = "identity"  # another key owns this connection's id, or this run
    BOUNDS = "bounds"  # a number or name no training job has
    RUNS = "runs"  # too many runs at the same time
    BACKLOG = "backlog"  # the disk is behind: the relay keeps the frame and sends it again


REJECTION_REASONS: tuple[str, ...] = (*(r.value for r in Refusal), *(r.value for r in Rejection))


class NotAdmitted(Exception):
    """A message that must not be acted on; ``reason`` is one of ``Rejection``."""

    def __init__(self, reason: Rejection, detail: str = "") -> None:
        super().__init__(f"message turned away ({reason}): {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Inbound:
    """An admitted message. ``route`` is where an answer goes, ``user`` the public key it was sent under."""

    route: bytes
    user: str
    envelope: Envelope
    frame: bytes
    reports: tuple[Report, ...]
    critical: bool
    piece: PartPiece | None = None


def admit(message: Sequence[zmq.Frame], allowed: Container[str]) -> Inbound:
    """Check one ROUTER message. Raises NotAdmitted or FrameRefused."""
    if len(message) != 3:
        raise NotAdmitted(Rejection.PARTS, f"{len(message)} parts")
    user = _user(message[-1])
    if user not in allowed:
        raise NotAdmitted(Rejection.REVOKED, user)
    route, head, frame = (part.bytes for part in message)
    envelope = decode_envelope(head)
    _check_envelope(envelope)
    if frame[2:3] == CLASS_PIECE:
        piece = decode_piece(frame)
        _check_report(piece)
        return Inbound(route, user, envelope, frame, (), False, piece)
    reports = tuple(decode_reports(frame))
    for report in reports:
        _check_report(report)
    critical = frame[2:3] == CLASS_CRITICAL or any(is_critical(report) for report in reports)
    return Inbound(route, user, envelope, frame, reports, critical)


def _user(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _check_envelope(envelope: Envelope) -> None:
    for name in (envelope.run_id, envelope.relay):
        if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
            raise NotAdmitted(Rejection.BOUNDS, "run id or relay name")
    if not (0 <= envelope.sequence < MAX_COUNTER and 0 <= envelope.node < MAX_WORLD_SIZE):
        raise NotAdmitted(Rejection.BOUNDS, "sequence or node")
    _check_world_size(envelope.world_size)


def _check_report(report: Report | PartPiece) -> None:
    if not 0 <= report.attempt < MAX_WORLD_SIZE:
        raise NotAdmitted(Rejection.BOUNDS, "attempt")
    if not isinstance(report, NodeEnded) and not -1 <= report.rank < MAX_WORLD_SIZE:
        raise NotAdmitted(Rejection.BOUNDS, "rank")
    if isinstance(report, Hello):
        _check_world_size(report.world_size)
    for name in ("round", "step", "last_round"):
        if not -1 <= getattr(report, name, 0) < MAX_COUNTER:
            raise NotAdmitted(Rejection.BOUNDS, name)


def _check_world_size(world_size: int) -> None:
    if not 0 <= world_size <= MAX_WORLD_SIZE:
        raise NotAdmitted(Rejection.BOUNDS, "world size")


__all__ = ["REJECTION_REASONS", "FrameRefused", "Inbound", "NotAdmitted", "Rejection", "admit"]
