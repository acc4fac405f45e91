"""The link between a node's relay and the coordinator: the envelope around report frames, acknowledgements, and the join file.

Owns the multipart layout and who may connect. Knows no sockets.

relay -> coordinator: ``[envelope, report frame]``; coordinator -> relay: ``[b"ack", sequence]`` or ``[b"cmd", command frame]``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import tempfile
from pathlib import Path

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sentinel.wire.codec import FrameRefused, Refusal

PART_ACK = b"ack"
PART_COMMAND = b"cmd"
COMMAND_LIFETIME_SECONDS = 60.0


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who sent a frame. ``sequence`` is per relay process and acknowledged; ``relay`` tells one relay process from the next."""

    run_id: str
    node: int
    relay: str
    sequence: int
    world_size: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    """Bytes of the first part of a relay's message."""
    return _encoder.encode(envelope)


def decode_envelope(part: bytes) -> Envelope:
    """Envelope of a relay's message. Raises FrameRefused."""
    if len(part) > 1024:
        raise FrameRefused(Refusal.OVERSIZE, "envelope")
    try:
        return _decoder.decode(part)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameRefused(Refusal.MALFORMED, f"envelope: {error}"[:200]) from error


def acting_token(command_key: str) -> str:
    """The token that lets who holds the join file act on a coordinator (acknowledge, dump), made from its hex ``command_key``."""
    return hmac.new(bytes.fromhex(command_key), b"sentinel: act", hashlib.sha256).hexdigest()


class Join(BaseModel):
    """All that a launcher needs to reach a coordinator: where it is, its key, and the client's own key pair (Z85).

    It is a secret: the file is written 0600, and between nodes it travels only through the job's own rendezvous store.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str = Field(description="tcp://host:port of the coordinator's ROUTER")
    server_key: str = Field(min_length=40, max_length=40, description="the coordinator's CURVE public key, Z85")
    client_public: str = Field(min_length=40, max_length=40)
    client_secret: str = Field(min_length=40, max_length=40, repr=False)
    command_key: str = Field(pattern="^([0-9a-fA-F]{2}){16,}$", repr=False, description="hex; signs commands to ranks")
    http: str | None = Field(default=None, description="http://host:port of the coordinator's pages, if it serves any")
    run_dir: str | None = Field(default=None, description="the coordinator's run directory on its own host")

    def write(self, path: Path) -> None:
        """Write the join file with mode 0600, whole or not at all."""
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        tmp = Path(name)
        try:
            with os.fdopen(fd, "w") as out:
                out.write(self.model_dump_json(indent=1))
            tmp.replace(path)
        except OSError:
            tmp.unlink(missing_ok=True)
            raise

    @staticmethod
    def read(path: Path) -> Join:
        """Read a join file. Raises OSError, or ValueError with one line saying what is wrong with it."""
        try:
            return Join.model_validate(json.loads(path.read_text()))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()[:3])
            raise ValueError(f"{path} is not a join file: {wrong}") from error
        except ValueError as error:
            raise ValueError(f"{path} is not a join file: {error}") from error
