"""Keys of a coordinator: its own CURVE pair, the pair it hands out in the join file, and the key that signs commands.

Owns making, keeping and loading keys. Who may connect with them is decided in ``zap.py``.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Self

import zmq
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sentinel.wire.link import Join

KEY_FILE = "coordinator.key"
COMMAND_KEY_BYTES = 32


class KeysUnusable(ValueError):
    """The key file cannot be trusted or read; the text says why in one line."""


class Keys(BaseModel):
    """All keys of one coordinator (CURVE keys in Z85, the command key in hex)."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    server_public: str = Field(min_length=40, max_length=40)
    server_secret: str = Field(min_length=40, max_length=40, repr=False)
    client_public: str = Field(min_length=40, max_length=40)
    client_secret: str = Field(min_length=40, max_length=40, repr=False)
    command_key: str = Field(min_length=2 * COMMAND_KEY_BYTES, pattern=r"^[0-9a-f]+$", repr=False)

    @model_validator(mode="after")
    def _pairs_match(self) -> Self:
        pairs = ((self.server_public, self.server_secret), (self.client_public, self.client_secret))
        if any(not _is_pair(public, secret) for public, secret in pairs):
            raise ValueError("a public key does not belong to its secret key")
        return self

    def join(self, endpoint: str, *, http: str | None, run_dir: Path) -> Join:
        """What a launcher needs to connect to ``endpoint``."""
        return Join(
            endpoint=endpoint,
            server_key=self.server_public,
            client_public=self.client_public,
            client_secret=self.client_secret,
            command_key=self.command_key,
            http=http,
            run_dir=str(run_dir),
        )


def ephemeral_keys() -> Keys:
    """New keys that live as long as this process."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return Keys(
        server_public=server_public.decode(),
        server_secret=server_secret.decode(),
        client_public=client_public.decode(),
        client_secret=client_secret.decode(),
        command_key=secrets.token_hex(COMMAND_KEY_BYTES),
    )


def persistent_keys(path: Path) -> Keys:
    """Keys of ``path``, made and written (0600) if there are none, so that relays find the same coordinator after a restart.

    Raises KeysUnusable if the file is readable by others or is not a key file, OSError if it cannot be written.
    """
    try:
        return _load(path)
    except FileNotFoundError:
        keys = ephemeral_keys()
        _write_new(path, keys.model_dump_json(indent=1))
        return keys


def _load(path: Path) -> Keys:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise KeysUnusable(f"{path} cannot be read: {error.strerror}") from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode) or mode & 0o077:
            raise KeysUnusable(f"{path} must be a plain file that only its owner can read (chmod 600)")
        return Keys.model_validate_json(os.read(fd, 65536))
    except ValidationError as error:
        raise KeysUnusable(f"{path} is not a coordinator's key file") from error
    finally:
        os.close(fd)


def _write_new(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(fd)


def _is_pair(public: str, secret: str) -> bool:
    try:
        return zmq.curve_public(secret.encode()) == public.encode()
    except (zmq.ZMQError, ValueError):
        return False
