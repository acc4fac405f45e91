"""How the launchers of several nodes find one coordinator: through the store of the job's own rendezvous.

Owns who embeds the coordinator (the launcher that hosts the store), the exchange of run id and join, and node numbers. The store
is torchrun's: the hosting launcher opens it first, as a multi-tenant server, and torchrun then shares that server; the others
are further clients of it. So no second port is needed, and a client of ours that waits never holds up one of torchrun's.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
)

from sentinel.coordinator.config import is_loopback
from sentinel.wire.link import Join

JOIN_SECONDS = 30.0  # from the moment the store answers
CONNECT_SECONDS = 60.0  # torchrun's own patience with a c10d store; without one there is no job either
STATIC_PORT = 29500  # torchrun's default --master-port
POLL_SECONDS = 0.1
OUTSIDE = "192.0.2.1"  # reserved for documentation: nobody is there, but the way there is the default route

_JOIN, _NODES, _DRAINED = "join", "nodes", "drained"


class NoRendezvous(Exception):
    """The launchers cannot meet; the text says why in one line."""


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where the job's rendezvous store is, and whether this launcher's node is to host it."""

    host: str
    port: int
    hosting: bool | None  # None: whoever of this machine comes first
    prefix: str


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the hosting launcher tells the others. ``join`` None: it has no coordinator, nobody needs to wait for one."""

    run_id: str
    join: Join | None


def meeting_point(torchrun: argparse.Namespace) -> MeetingPoint:
    """Meeting point of the job these flags describe. Raises NoRendezvous for backends without a TCP store."""
    configuration = _parse_rendezvous_config(torchrun.rdzv_conf)
    prefix = f"sentinel/{torchrun.rdzv_id}"
    if torchrun.rdzv_backend == "static":
        address = torchrun.rdzv_endpoint or f"{torchrun.master_addr}:{torchrun.master_port or STATIC_PORT}"
        host, port = parse_rendezvous_endpoint(address, STATIC_PORT)
        return MeetingPoint(host, port, hosting=int(torchrun.node_rank) == 0, prefix=prefix)
    if torchrun.rdzv_backend != "c10d" or configuration.get("store_type", "tcp") != "tcp":
        raise NoRendezvous(f"rendezvous backend {torchrun.rdzv_backend} has no store that launchers could share")
    host, port = parse_rendezvous_endpoint(torchrun.rdzv_endpoint, DEFAULT_PORT)
    return MeetingPoint(host, port, _hosts_c10d(host, configuration.get("is_host")), prefix)


class Rendezvous:
    """This launcher's place at the meeting point. Keep it until the job is over: it may hold the store's server."""

    def __init__(self, store: Store, hosting: bool, host: str) -> None:
        self.hosting = hosting
        self.host = host
        self.node = store.add(_NODES, 1) - 1 if hosting else -1
        self._store = store

    def invite(self, invitation: Invitation) -> None:
        """Host: tell the other launchers, now and whenever they come."""
        join = invitation.join.model_dump() if invitation.join else None
        self._store.set(_JOIN, json.dumps({"run_id": invitation.run_id, "join": join}))

    def accept(self, timeout: float | None = None) -> Invitation:
        """Guest: wait for the invitation (default: JOIN_SECONDS), and take a node number. Raises NoRendezvous."""
        timeout = JOIN_SECONDS if timeout is None else timeout
        deadline = time.monotonic() + timeout
        try:
            while not self._store.check([_JOIN]):
                if time.monotonic() >= deadline:
                    raise NoRendezvous(f"no word from the launcher on {self.host} within {timeout:.0f} s")
                time.sleep(POLL_SECONDS)
            told = json.loads(self._store.get(_JOIN))
            self.node = self._store.add(_NODES, 1) - 1
            return Invitation(told["run_id"], Join.model_validate(told["join"]) if told["join"] else None)
        except (DistError, ValueError, KeyError) as error:
            raise NoRendezvous(f"the launcher on {self.host} could not be understood: {_line(error)}") from error

    def leave(self) -> None:
        """Guest: say that everything of this node has reached the coordinator, or never will."""
        try:
            self._store.add(_DRAINED, 1)
        except DistError:
            return  # the host is gone, and with it whoever would have waited

    def wait_for_guests(self, timeout: float) -> int:
        """Host: wait until every launcher that came has left; how many are missing at the deadline."""
        deadline = time.monotonic() + timeout
        while (missing := self._guests_here()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return missing

    def _guests_here(self) -> int:
        try:
            return int(self._store.add(_NODES, 0) - 1 - self._store.add(_DRAINED, 0))
        except DistError:
            return 0  # without its store the host cannot hear of anybody any more


def meet(point: MeetingPoint, connect_timeout: float = CONNECT_SECONDS) -> Rendezvous:
    """Open the job's store as its host, or connect to it as a guest once it answers. Raises NoRendezvous."""
    if point.hosting is not False and not _answers(point.host, point.port):
        try:
            store = _open(point, is_master=True)
            return Rendezvous(PrefixStore(point.prefix, store), True, point.host)
        except DistError as error:
            if point.hosting:
                raise NoRendezvous(f"cannot open port {point.port} on {point.host}: {_line(error)}") from error
    elif point.hosting:
        raise NoRendezvous(f"port {point.port} on {point.host} is already taken")
    return _connect(point, connect_timeout)


def local_address_towards(host: str) -> str:
    """This machine's address on the interface that ``host`` names, or that leads to it. Raises NoRendezvous.

    Where ``host`` is one of this machine's own addresses, it is that address; behind a service name or an address
    translation it is the outgoing interface's. A machine's own name that resolves to loopback (as some distributions set
    it up) resolves to something else on the other nodes, so that the outgoing interface is taken then too.
    """
    try:
        address = _route_to(host)
        if is_loopback(address) and not is_loopback(host):
            address = _route_to(OUTSIDE)
        return address
    except OSError as error:
        raise NoRendezvous(f"cannot tell which interface leads to {host}: {_line(error)}") from error


def _route_to(host: str) -> str:
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: it only asks the routing table
        return str(probe.getsockname()[0])


def _hosts_c10d(host: str, is_host: str | None) -> bool | None:
    """torchrun's own rule for c10d: as configured, else only a launcher on the endpoint's machine may try."""
    if is_host is not None:
        return is_host.lower() in ("1", "true", "t", "yes", "y")
    return None if _matches_machine_hostname(host) else False


def _connect(point: MeetingPoint, timeout: float) -> Rendezvous:
    deadline = time.monotonic() + timeout
    while not _answers(point.host, point.port):  # a store's own waiting would be deaf to Ctrl-C, and loud
        if time.monotonic() >= deadline:
            raise NoRendezvous(f"no rendezvous store at {point.host}:{point.port} within {timeout:.0f} s")
        time.sleep(POLL_SECONDS)
    try:
        return Rendezvous(PrefixStore(point.prefix, _open(point, is_master=False)), False, point.host)
    except DistError as error:
        raise NoRendezvous(f"{point.host}:{point.port} is not a rendezvous store: {_line(error)}") from error


def _open(point: MeetingPoint, is_master: bool) -> TCPStore:
    patience = timedelta(seconds=JOIN_SECONDS)
    return TCPStore(point.host, point.port, None, is_master, patience, wait_for_workers=False, multi_tenant=True)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2.0):
            return True
    except OSError:
        return False


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
