"""One sample of every message that crosses the wire, and the frames they make: the golden bytes of the protocol.

Owns the samples of the wire's tests (``from service.wire.samples import ...``). Values follow from the fields' names and places
alone, so that a field that is added, dropped or moved changes the bytes. To write the bytes of a new protocol, raise ``PROTOCOL``
and then:

    cd tests && python -m service.wire.samples
"""

from __future__ import annotations

import json
import types
import typing
from enum import EnumType
from pathlib import Path
from typing import Any

import msgspec

from sentinel.wire import messages
from sentinel.wire.codec import PROTOCOL, encode_command, encode_piece, encode_reports
from sentinel.wire.link import Envelope, encode_envelope
from sentinel.wire.messages import Command, PartPiece, Report

GOLDEN = Path(__file__).parent / "golden"
KEY = bytes(range(32))
REPORTS: tuple[type[Any], ...] = typing.get_args(Report)
COMMANDS: tuple[type[Any], ...] = typing.get_args(Command)


def sample(message: type[Any], *, whole: bool = True) -> Any:
    """A message of this type with every field set, or (not ``whole``) with the fields that have no default."""
    hints = typing.get_type_hints(message, vars(messages))
    fields = [f for f in msgspec.structs.fields(message) if whole or f.required]
    return message(**{f.name: _value(f.name, hints[f.name], place) for place, f in enumerate(fields)})


def _value(name: str, hint: Any, place: int) -> Any:
    """A value of type ``hint`` that names its field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return _value(name, arguments[0], place)
    if origin is tuple:
        return (_value(name, arguments[0], place),)
    if origin is dict:
        return {_value(name, arguments[0], place): _value(name, arguments[1], place)}
    if isinstance(hint, EnumType):
        return list(hint)[place % len(hint)]
    if issubclass(hint, msgspec.Struct):
        return sample(hint)
    simple = {bool: True, int: 1000 + place, float: place + 0.5, str: name, bytes: name.encode()}
    return simple[hint]


def frames() -> dict[str, bytes]:
    """Name -> frame of every message, whole and bare, of a batch of all reports, and of the envelope."""
    made = {"envelope": encode_envelope(sample(Envelope)), "batch": encode_reports([sample(r) for r in REPORTS])}
    for report in REPORTS:
        made[report.__name__] = encode_reports([sample(report)])
        made[f"{report.__name__} bare"] = encode_reports([sample(report, whole=False)])
    for command in COMMANDS:
        made[command.__name__] = encode_command(sample(command), KEY)
        made[f"{command.__name__} bare"] = encode_command(sample(command, whole=False), KEY)
    made["PartPiece"] = encode_piece(sample(PartPiece))
    made["PartPiece bare"] = encode_piece(sample(PartPiece, whole=False))
    return made


def golden_file(protocol: int) -> Path:
    """Where the frames of a protocol version are kept."""
    return GOLDEN / f"v{protocol}.json"


def read_golden(protocol: int) -> dict[str, bytes]:
    """Name -> frame as it was written down for a protocol version."""
    return {name: bytes.fromhex(frame) for name, frame in json.loads(golden_file(protocol).read_text()).items()}


if __name__ == "__main__":
    written = {name: frame.hex() for name, frame in frames().items()}
    golden_file(PROTOCOL).write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    print(f"wrote {len(written)} frames to {golden_file(PROTOCOL)}")
