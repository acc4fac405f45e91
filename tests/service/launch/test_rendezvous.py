"""How the launchers of several nodes meet: real stores, other launchers as threads or processes."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from sentinel.launch import rendezvous
from sentinel.launch.options import parse
from sentinel.launch.rendezvous import (
    Invitation,
    MeetingPoint,
    NoRendezvous,
    local_address_towards,
    meet,
    meeting_point,
)
from sentinel.wire.link import Join

JOIN = Join(
    endpoint="tcp://127.0.0.1:5555",
    server_key="s" * 40,
    client_public="p" * 40,
    client_secret="c" * 40,
    command_key="ab" * 32,
)


def torchrun(*words: str) -> argparse.Namespace:
    """torchrun's namespace of a command line."""
    return parse([*words, "train.py"], {}).torchrun


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def point(port: int, hosting: bool | None) -> MeetingPoint:
    """A meeting point on this machine."""
    return MeetingPoint("127.0.0.1", port, hosting, "sentinel/job7")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nnodes", "2", "--master-addr", "head", "--master-port", "29511"], ("head", 29511, True)),
        (["--nnodes", "2", "--master-addr", "head", "--node-rank", "1"], ("head", 29500, False)),
        (["--nnodes", "2", "--rdzv-endpoint", "head:7", "--node-rank", "1"], ("head", 7, False)),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1"], ("127.0.0.1", 29400, None)),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "192.0.2.7:9"], ("192.0.2.7", 9, False)),
        (
            ["--rdzv-backend", "c10d", "--rdzv-endpoint", "192.0.2.7:9", "--rdzv-conf", "is_host=1"],
            ("192.0.2.7", 9, True),
        ),
        (
            ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:9", "--rdzv-conf", "is_host=0"],
            ("127.0.0.1", 9, False),
        ),
    ],
)
def test_the_meeting_point_is_torchruns(words: list[str], expected: tuple[str, int, bool | None]) -> None:
    """Host, port and who hosts follow torchrun's own rules for static and c10d rendezvous."""
    found = meeting_point(torchrun(*words))
    assert (found.host, found.port, found.hosting) == expected


@pytest.mark.parametrize(
    "words", [["--rdzv-backend", "etcd-v2"], ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"]]
)
def test_backends_without_a_tcp_store_are_named(words: list[str]) -> None:
    """Where launchers share no TCP store they cannot meet, and the backend is named."""
    with pytest.raises(NoRendezvous, match=words[1]):
        meeting_point(torchrun(*words))


def test_a_guest_gets_the_hosts_invitation_and_a_number(port: int) -> None:
    """Run id and join reach the guests whole; every launcher has a node number of its own, the host 0."""
    host = meet(point(port, True))
    with ThreadPoolExecutor() as pool:
        guests = [pool.submit(lambda: meet(point(port, False))) for _ in range(2)]
        met = [guest.result() for guest in guests]
        answers = [pool.submit(guest.accept, 10.0) for guest in met]
        host.invite(Invitation("run-1", JOIN))
        assert [answer.result() for answer in answers] == [Invitation("run-1", JOIN)] * 2
    assert [host.hosting, *(guest.hosting for guest in met)] == [True, False, False]
    assert sorted([host.node, *(guest.node for guest in met)]) == [0, 1, 2]
    assert host.node == 0


def test_a_host_without_a_coordinator_says_so_at_once(port: int) -> None:
    """A guest does not wait for a join that will never come."""
    host = meet(point(port, True))
    host.invite(Invitation("run-1", None))
    started = time.monotonic()
    assert meet(point(port, False)).accept(30.0) == Invitation("run-1", None)
    assert time.monotonic() - started < 5.0


def test_a_guest_that_comes_first_waits_for_the_store(port: int) -> None:
    """Nodes start in any order: a guest polls until the host's store answers."""
    with ThreadPoolExecutor() as pool:
        early = pool.submit(meet, point(port, False), 20.0)
        threading.Event().wait(0.3)  # let it find nobody first
        assert not early.done()
        host = meet(point(port, True))
        host.invite(Invitation("run-1", JOIN))
        assert early.result().accept(10.0).join == JOIN


def test_of_two_launchers_on_one_machine_one_hosts(port: int) -> None:
    """With c10d on this machine's address whoever comes first hosts, and the other is its guest."""
    first, second = meet(point(port, None)), meet(point(port, None))
    assert (first.hosting, second.hosting) == (True, False)


def test_jobs_with_other_ids_do_not_meet(port: int) -> None:
    """Two jobs in one store are kept apart by their rendezvous id."""
    host = meet(point(port, True))
    host.invite(Invitation("run-1", JOIN))
    stranger = meet(MeetingPoint("127.0.0.1", port, False, "sentinel/other"))
    with pytest.raises(NoRendezvous, match="no word from the launcher"):
        stranger.accept(0.3)


def test_torchrun_shares_the_store_that_we_opened(port: int) -> None:
    """The static rendezvous of torchrun, which counts its workers, works on our server as on its own."""
    host = meet(point(port, True))
    with ThreadPoolExecutor() as pool:
        stores = [
            pool.submit(TCPStore, "127.0.0.1", port, 2, rank == 0, timedelta(seconds=20), multi_tenant=True)
            for rank in (0, 1)
        ]
        first, second = (store.result() for store in stores)
    first.set("k", "v")
    assert second.get("k") == b"v"
    assert host.hosting


def test_no_store_at_all_is_said_with_its_address(port: int) -> None:
    """A guest whose host never comes gives up by name and deadline."""
    with pytest.raises(NoRendezvous, match=f"no rendezvous store at 127.0.0.1:{port}"):
        meet(point(port, False), connect_timeout=0.3)


def test_a_taken_port_is_said(port: int) -> None:
    """A host whose port belongs to another program does not embed, and says why."""
    with socket.create_server(("127.0.0.1", port)), pytest.raises(NoRendezvous, match="already taken"):
        meet(point(port, True))


def test_nonsense_in_the_store_is_refused(port: int) -> None:
    """An invitation that is none is an error in one line, not a crash."""
    host = meet(point(port, True))
    host._store.set("join", "{not json")
    with pytest.raises(NoRendezvous, match="could not be understood"):
        meet(point(port, False)).accept(5.0)


def test_the_host_waits_for_its_guests_to_leave(port: int) -> None:
    """The host keeps its coordinator until every guest has drained; one that never leaves costs the deadline."""
    host = meet(point(port, True))
    host.invite(Invitation("run-1", JOIN))
    guests = [meet(point(port, False)) for _ in range(2)]
    for guest in guests:
        guest.accept(5.0)
    guests[0].leave()
    assert host.wait_for_guests(0.3) == 1
    guests[1].leave()
    assert host.wait_for_guests(5.0) == 0


def test_a_guest_can_leave_a_host_that_is_gone(port: int) -> None:
    """Leaving after the host died is no error."""
    script = (
        "import sys\n"
        "from sentinel.launch.rendezvous import Invitation, MeetingPoint, meet\n"
        f"host = meet(MeetingPoint('127.0.0.1', {port}, True, 'sentinel/job7'))\n"
        "host.invite(Invitation('run-1', None))\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        guest = meet(point(port, False))
        guest.accept(20.0)
        process.kill()
        process.wait()
        guest.leave()


def test_the_interface_is_the_one_the_endpoint_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback stays loopback; a machine's own name that resolves to loopback means the outgoing interface."""
    assert local_address_towards("127.0.0.1") == "127.0.0.1"
    assert local_address_towards("localhost") in ("127.0.0.1", "::1")
    monkeypatch.setattr(rendezvous, "_route_to", {"head": "127.0.1.1", rendezvous.OUTSIDE: "10.0.0.7"}.__getitem__)
    assert local_address_towards("head") == "10.0.0.7"


def test_a_name_that_leads_nowhere_is_said() -> None:
    """An endpoint that does not resolve is named."""
    with pytest.raises(NoRendezvous, match=r"leads to no-such-host\.invalid"):
        local_address_towards("no-such-host.invalid")
