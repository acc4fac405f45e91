"""The coordinator inside the launcher: where it listens, and what it has judged once it stopped.

Owns the translation from launch options to coordinator settings. The coordinator itself is ``sentinel/coordinator``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from sentinel.coordinator.app import Coordinator
from sentinel.coordinator.config import (
    CoordinatorSettings,
    is_loopback,
    join_host_port,
    reachable_host,
    split_host_port,
)
from sentinel.coordinator.store import IncidentReader
from sentinel.incidents.model import Incident
from sentinel.launch.options import LaunchOptions
from sentinel.launch.rendezvous import local_address_towards
from sentinel.wire.names import DATABASE


class CoordinatorRefused(ValueError):
    """The coordinator does not accept what it was told to do; the text says why in one line."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What the coordinator of this run found."""

    incidents: Sequence[Incident]
    rounds_checked: int
    benign_skips: int
    unwatched_ranks: int
    guard_skips: int


def start_coordinator(options: LaunchOptions, run_dir: Path, run_id: str, host: str | None) -> Coordinator:
    """Start a coordinator for this one run: on loopback, or for several nodes on the interface that ``host`` names.

    Raises CoordinatorRefused for settings it does not accept, OSError or zmq.ZMQError if it cannot listen or write,
    NoRendezvous if the interface cannot be told.
    """
    return Coordinator(settings(options, run_dir, run_id, host)).start()


def settings(options: LaunchOptions, run_dir: Path, run_id: str, host: str | None) -> CoordinatorSettings:
    """Settings of an embedded coordinator. Raises CoordinatorRefused, NoRendezvous."""
    http = options.http_bind
    try:
        bind = _bind(options, host)
        return CoordinatorSettings(
            run_dir=run_dir,
            run_id=run_id,
            bind=bind,
            advertise_host=reachable_host(split_host_port(bind.removeprefix("tcp://"))[0]),
            http_enabled=http is not None,
            http_bind=http or "127.0.0.1:0",
            # The flag is the explicit wish; a token is still asked for by the settings themselves.
            http_allow_remote=http is not None and not is_loopback(split_host_port(http)[0]),
        )
    except ValidationError as error:
        raise CoordinatorRefused(f"the coordinator refuses its settings: {error.errors()[0]['msg']}") from error
    except ValueError as error:
        raise CoordinatorRefused(f"the coordinator refuses its settings: {error}") from error


def judged(run_dir: Path, run_id: str) -> Judged:
    """Verdicts of a coordinator that has stopped, from its database. Raises StoreUnreadable."""
    with IncidentReader(run_dir / DATABASE) as reader:
        incidents = reader.incidents(run_id)
        counts = next((run.counts for run in reader.runs() if run.run_id == run_id), {})
    names = ("rounds_checked", "benign_skips", "unwatched_ranks", "guard_skips")
    return Judged(incidents, *(counts.get(name, 0) for name in names))


def _bind(options: LaunchOptions, host: str | None) -> str:
    if options.bind is not None:
        return _endpoint(options.bind)
    return f"tcp://{join_host_port(local_address_towards(host), 0)}" if host else "tcp://127.0.0.1:0"


def _endpoint(address: str) -> str:
    """``HOST``, ``HOST:PORT`` or ``[V6]:PORT`` as a tcp endpoint; without a port a free one is taken."""
    address = address.removeprefix("tcp://")
    has_port = address.count(":") == 1 or "]:" in address
    return f"tcp://{address if has_port else join_host_port(address.strip('[]'), 0)}"
