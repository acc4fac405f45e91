"""Settings of a coordinator: where it listens, where it keeps things, and what it refuses to do unasked.

Owns the coordinator's only reading of the environment (``SENTINEL_COORDINATOR_…``, so that the variables a launcher sets for its
ranks never reach a coordinator by accident). Binds nothing itself.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
TOKEN_MIN_CHARACTERS = 16


class CoordinatorSettings(BaseSettings):
    """Everything a coordinator can be told. Keyword arguments win over the environment.

    ``run_id`` set: an embedded coordinator that serves this one run and makes new keys. Unset: a standalone one that serves
    many runs and keeps its keys in ``run_dir`` over restarts.
    """

    model_config = SettingsConfigDict(
        env_prefix="SENTINEL_COORDINATOR_", frozen=True, extra="forbid", hide_input_in_errors=True
    )

    run_dir: Path = Field(description="holds sentinel.db, join.json, bundles/ and, standalone, coordinator.key")
    run_id: str | None = Field(default=None, min_length=1, max_length=256)
    bind: str = Field(default="tcp://127.0.0.1:0", description="endpoint of the ROUTER; port 0 takes a free one")
    advertise_host: str | None = Field(default=None, description="host written into join.json; default: the bound one")
    http_enabled: bool = True
    http_bind: str = Field(default="127.0.0.1:0", description="host:port of the pages and /metrics")
    http_allow_remote: bool = Field(default=False, description="permit http_bind beyond loopback; needs http_token")
    http_token: SecretStr | None = Field(default=None, description="bearer token asked for by every page but /healthz")
    synchronous: Literal["full", "normal"] = Field(default="full", description="SQLite's PRAGMA synchronous")
    healthy_frames_kept: int = Field(default=100_000, ge=0, description="frames without evidence kept per run")
    client_keys: tuple[str, ...] = Field(default=(), description="further CURVE public keys (Z85) that may connect")
    fetch_bytes: int = Field(default=4 << 30, ge=0, description="bytes of one bundle fetched from other hosts at most")
    max_runs: int = Field(default=256, ge=1, description="runs served at the same time")
    expected_relays: int = Field(default=0, ge=0, description="refuse to start if the file limit cannot hold them")

    @property
    def standalone(self) -> bool:
        """True if this coordinator outlives single runs."""
        return self.run_id is None

    @field_validator("bind")
    @classmethod
    def _bind_is_tcp(cls, bind: str) -> str:
        if not bind.startswith("tcp://"):
            raise ValueError(f"bind must be tcp://host:port, not {bind!r}")
        split_host_port(bind.removeprefix("tcp://"))
        return bind

    @field_validator("http_bind")
    @classmethod
    def _http_bind_is_host_port(cls, http_bind: str) -> str:
        split_host_port(http_bind)
        return http_bind

    @field_validator("client_keys")
    @classmethod
    def _client_keys_are_z85(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for key in keys:
            if len(key) != 40 or not key.isascii():
                raise ValueError("a client key is 40 characters of Z85")
        return keys

    @model_validator(mode="after")
    def _pages_stay_private(self) -> Self:
        if self.http_token is not None and len(self.http_token.get_secret_value()) < TOKEN_MIN_CHARACTERS:
            raise ValueError(f"http_token needs at least {TOKEN_MIN_CHARACTERS} characters")
        host, _ = split_host_port(self.http_bind)
        if not self.http_enabled or is_loopback(host):
            return self
        if not self.http_allow_remote:
            raise ValueError(
                f"http_bind {self.http_bind} is reachable from other hosts: set http_allow_remote and http_token"
            )
        if self.http_token is None:
            raise ValueError(f"http_bind {self.http_bind} is reachable from other hosts: set http_token")
        return self


def split_host_port(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``. Raises ValueError naming the address."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)


def join_host_port(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True if only this host can reach ``host``. A name other than localhost is taken as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOOPBACK_NAMES


def reachable_host(host: str) -> str:
    """The host to advertise for a bound one: a wildcard becomes this machine's name."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "*") else host  # noqa: S104 - compared, not bound
