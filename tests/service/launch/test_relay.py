"""The node's relay between real sockets: ranks on ipc, a CURVE ROUTER in the coordinator's place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from sentinel.launch import downlink, outbox
from sentinel.launch import relay as relay_module
from sentinel.launch.outbox import Drop
from sentinel.launch.relay import Relay, RelayIdentity
from sentinel.launch.spool import read_spool
from sentinel.wire.codec import PROTOCOL, Refusal, decode_reports, encode_command, encode_reports
from sentinel.wire.link import Join, decode_envelope
from sentinel.wire.messages import ClosedBy, Counted, Disabled, DumpRequest, NodeEnded, Released, RoundClosed

KEY = bytes.fromhex("ab" * 32)
IDENTITY = RelayIdentity(run_id="run-1", node=2, world_size=4)

StartRelay = Callable[..., Relay]
Connect = Callable[..., zmq.SyncSocket]


def critical(rank: int = 1) -> bytes:
    """A frame that must not be lost."""
    return encode_reports([Disabled(0, rank, "test")])


def sample(round_: int, rank: int = 1) -> bytes:
    """A frame of a healthy round."""
    return encode_reports([RoundClosed(0, rank, round_, round_, ClosedBy.OPTIMIZER, 1.0, 0, 5)])


@pytest.fixture
def start_relay(tmp_path: Path) -> Iterator[StartRelay]:
    """Start relays that end with the test."""
    started: list[Relay] = []

    def start(join: Join | None) -> Relay:
        started.append(Relay(IDENTITY, join, tmp_path).start())
        return started[-1]

    yield start
    for relay in started:
        relay.stop()
        assert relay.failure is None


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connect ranks to a relay."""
    context = zmq.Context()
    sockets: list[zmq.SyncSocket] = []

    def dealer(relay: Relay, rank: int = 1, attempt: int = 0) -> zmq.SyncSocket:
        socket = context.socket(zmq.DEALER)
        sockets.append(socket)
        socket.linger = 500
        socket.routing_id = f"rank-{attempt}-{rank}-{os.getpid()}".encode()
        socket.connect(relay.address)
        return socket

    yield dealer
    context.destroy(linger=0)


def test_a_frame_travels_unchanged_inside_its_envelope(coordinator, start_relay, connect) -> None:
    """The coordinator gets a rank's own frame, with run, node, relay and world size around it."""
    relay = start_relay(coordinator.join)
    connect(relay).send(critical())
    envelope, reports = coordinator.receive()
    assert reports == decode_reports(critical())
    assert (envelope.run_id, envelope.node, envelope.world_size) == ("run-1", 2, 4)
    assert envelope.relay == relay.name
    assert envelope.sequence == 1


def test_a_critical_frame_stays_until_acknowledged(coordinator, start_relay, connect, tmp_path, wait) -> None:
    """A critical frame is on disk until the coordinator has it, and nothing is left of it afterwards."""
    relay = start_relay(coordinator.join)
    connect(relay).send(critical())
    envelope, _ = coordinator.receive()
    spooled = tmp_path / "spool" / f"{relay.name}.frames"
    wait(lambda: spooled.exists() and [frame for _, frame in read_spool(spooled)] == [critical()])
    assert relay.drained().unsent_critical == 1
    coordinator.acknowledge(envelope)
    wait(lambda: relay.drained().unsent_critical == 0)
    assert relay.stop().unsent_critical == 0
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_critical_frame_is_sent_again_if_no_acknowledgement_comes(
    coordinator, start_relay, connect, monkeypatch
) -> None:
    """The same frame under the same sequence comes again, so that the coordinator can tell that it is the same."""
    monkeypatch.setattr(outbox, "RESEND_SECONDS", 0.1)
    connect(start_relay(coordinator.join)).send(critical())
    first, _ = coordinator.receive()
    again, reports = coordinator.receive()
    assert again == first
    assert reports == decode_reports(critical())


def test_a_restarted_coordinator_gets_what_the_old_one_did_not_acknowledge(
    fake_coordinator, start_relay, connect, wait
) -> None:
    """After a coordinator dies, its successor with the same keys and port gets every unacknowledged critical frame."""
    first = fake_coordinator()
    relay = start_relay(first.join)
    rank = connect(relay)
    rank.send(critical(rank=1))
    lost, _ = first.receive()
    wait(lambda: relay.connected)
    first.close()
    wait(lambda: not relay.connected)
    rank.send(critical(rank=3))
    second = fake_coordinator(first.port, first.keys)
    seen = {}
    while len(seen) < 2:
        envelope, reports = second.receive()
        seen[envelope.sequence] = reports[0].rank
        second.acknowledge(envelope)
    assert seen == {lost.sequence: 1, lost.sequence + 1: 3}
    assert relay.drain(5.0).unsent_critical == 0


def test_samples_without_a_coordinator_are_dropped_and_counted(start_relay, connect, wait, monkeypatch) -> None:
    """A run without a coordinator keeps the newest samples, counts the others, and never holds a rank up."""
    monkeypatch.setattr(outbox, "MAX_SAMPLES", 10)
    relay = start_relay(None)
    rank = connect(relay)
    for round_ in range(200):
        rank.send(sample(round_), zmq.NOBLOCK)
    wait(lambda: relay.drained().drops == {Drop.COORDINATOR_UNREACHABLE: 190})
    assert relay.stop().drops == {Drop.COORDINATOR_UNREACHABLE: 200}


def test_critical_frames_without_a_coordinator_are_left_in_the_spool(start_relay, connect, tmp_path, wait) -> None:
    """A run without a coordinator leaves every critical report on disk, with its envelope, also after the end."""
    relay = start_relay(None)
    rank = connect(relay)
    for number in range(3):
        rank.send(critical(rank=number))
    wait(lambda: relay.drained().unsent_critical == 3)
    relay.node_ended(1)
    started = time.monotonic()
    assert relay.drain(10.0).unsent_critical == 4
    assert time.monotonic() - started < 5.0, "without a coordinator there is nobody to wait for"
    relay.stop()
    (spooled,) = (tmp_path / "spool").iterdir()
    kept = [(decode_envelope(envelope).sequence, decode_reports(frame)[-1]) for envelope, frame in read_spool(spooled)]
    assert [type(report) for _, report in kept] == [Disabled, Disabled, Disabled, NodeEnded]
    assert [report.rank for _, report in kept[:3]] == [0, 1, 2]
    assert len({sequence for sequence, _ in kept}) == 4


def test_a_frozen_coordinator_never_blocks_a_rank(coordinator, start_relay, connect, monkeypatch) -> None:
    """With a coordinator that reads nothing, ranks go on sending without waiting, and the losses have a name."""
    monkeypatch.setattr(outbox, "MAX_SAMPLES", 50)
    monkeypatch.setattr("sentinel.launch.uplink.HIGH_WATER_FRAMES", 50)
    coordinator.router.rcvhwm = 1  # after bind, for pipes to come
    relay = start_relay(coordinator.join)
    rank = connect(relay)
    big = encode_reports([Disabled(0, 1, "x" * 60_000)])
    frame = big[:2] + b"D" + big[3:]  # the class byte makes it a sample: the relay does not look inside
    deadline = time.monotonic() + 20.0
    while Drop.RELAY_FULL not in relay.drained().drops:
        assert time.monotonic() < deadline, "the relay never ran full"
        if not rank.poll(1000, zmq.POLLOUT):
            pytest.fail("a rank would have waited for the coordinator")
        rank.send(frame, zmq.NOBLOCK)
    assert relay.drained().unsent_critical == 0


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", Refusal.TOO_SHORT),
        (b"GET / HTTP/1.1", Refusal.NOT_OURS),
        (b"S\x63C\x90", Refusal.PROTOCOL),
        (b"S" + bytes([PROTOCOL]) + b"K\x90", Refusal.NOT_OURS),
    ],
)
def test_frames_that_are_not_reports_are_refused_and_counted(
    frame, reason, coordinator, start_relay, connect, wait
) -> None:
    """What is not a report frame of this protocol goes no further than the relay, and is counted by reason."""
    relay = start_relay(coordinator.join)
    connect(relay).send(frame)
    wait(lambda: relay.drained().drops == {reason: 1})
    _, reports = coordinator.receive()
    assert reports == [Counted(0, -1, 2, {reason.value: 1}, {})]


def test_a_message_of_several_parts_is_refused(coordinator, start_relay, connect, wait) -> None:
    """A rank sends one frame at a time; anything else is counted, not relayed."""
    relay = start_relay(coordinator.join)
    connect(relay).send_multipart([critical(), critical()])
    wait(lambda: relay.drained().drops == {Refusal.NOT_OURS: 1})
    assert relay.drained().unsent_critical == 0


def test_commands_reach_the_ranks_they_name(coordinator, start_relay, connect) -> None:
    """A command goes, unchanged, to the named ranks of its attempt and to nobody else; no names means all of them."""
    relay = start_relay(coordinator.join)
    ranks = {key: connect(relay, *key) for key in [(0, 0), (1, 0), (0, 1)]}  # (rank, attempt)
    for rank, attempt in ranks:
        ranks[rank, attempt].send(critical(rank))
        coordinator.receive()
    named = encode_command(DumpRequest("c1", time.time() + 60, 0, 7, (1,)), KEY)
    everyone = encode_command(Released("c2", time.time() + 60, 0), KEY)
    coordinator.answer(b"cmd", named)
    coordinator.answer(b"cmd", everyone)
    assert ranks[1, 0].recv() == named
    assert ranks[1, 0].recv() == everyone
    assert ranks[0, 0].recv() == everyone
    assert not ranks[0, 1].poll(100), "another attempt's rank got the command"


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (encode_command(DumpRequest("c", 1e12, 0, 7), b"another key"), "command_signature"),
        (encode_command(DumpRequest("c", 1.0, 0, 7), KEY), "command_expired"),
        (b"S" + bytes([PROTOCOL]) + b"K", "command_too_short"),
    ],
)
def test_commands_that_must_not_be_obeyed_stop_here(
    command, fault, coordinator, start_relay, connect, monkeypatch
) -> None:
    """A forged, expired or torn command reaches no rank, and the coordinator learns the count by reason."""
    monkeypatch.setattr(relay_module, "COUNTED_SECONDS", 0.0)
    rank = connect(start_relay(coordinator.join))
    rank.send(critical())
    coordinator.receive()
    coordinator.answer(b"cmd", command)
    _, reports = coordinator.receive()
    assert reports == [Counted(0, -1, 2, {}, {fault: 1})]
    assert not rank.poll(100)


def test_a_dump_request_nobody_can_take_is_counted(coordinator, start_relay, connect, wait) -> None:
    """A request for a rank that is not here is a named loss; a Released for one that has left is nothing to report."""
    relay = start_relay(coordinator.join)
    connect(relay, 0).send(critical(0))
    coordinator.receive()
    coordinator.answer(b"cmd", encode_command(Released("c1", time.time() + 60, 0, (9,)), KEY))
    coordinator.answer(b"cmd", encode_command(DumpRequest("c2", time.time() + 60, 0, 7, (9,)), KEY))
    wait(lambda: relay.drained().drops == {Drop.COMMAND_UNDELIVERED: 1})


def test_unknown_messages_of_the_coordinator_are_counted(coordinator, start_relay, connect, monkeypatch) -> None:
    """A newer coordinator's message is passed over with a count."""
    monkeypatch.setattr(relay_module, "COUNTED_SECONDS", 0.0)
    connect(start_relay(coordinator.join)).send(critical())
    coordinator.receive()
    coordinator.answer(b"news", b"x")
    _, reports = coordinator.receive()
    assert reports == [Counted(0, -1, 2, {}, {"unknown_message": 1})]


def test_the_end_of_the_node_comes_after_everything_its_ranks_sent(coordinator, start_relay, connect) -> None:
    """NodeEnded carries node, exit code and newest attempt, after every frame that was under way when the ranks ended."""
    relay = start_relay(coordinator.join)
    rank = connect(relay, 1, attempt=3)
    for _ in range(500):
        rank.send(critical())
    first, reports = coordinator.receive()
    coordinator.acknowledge(first)
    order = [type(reports[0])]
    relay.node_ended(1)
    while NodeEnded not in order:
        envelope, reports = coordinator.receive()
        order += [type(report) for report in reports if not isinstance(report, Counted)]
        coordinator.acknowledge(envelope)
    assert order == [Disabled] * 500 + [NodeEnded]
    assert reports == [Counted(3, -1, 2, {}, {}), NodeEnded(3, 2, 1)]
    assert relay.drain(5.0).unsent_critical == 0


def test_a_coordinator_that_refuses_our_keys_is_told_apart(coordinator, start_relay, wait) -> None:
    """A wrong server key never connects, and nothing is thrown away because of it."""
    other, _ = zmq.curve_keypair()
    relay = start_relay(coordinator.join.model_copy(update={"server_key": other.decode()}))
    relay.node_ended(0)
    assert relay.drain(1.0).unsent_critical == 1
    assert not relay.connected


def test_stopping_is_quick_without_a_coordinator(start_relay, connect, coordinator) -> None:
    """A dead coordinator does not hold up the end: stop() returns within a second or so."""
    join = coordinator.join
    coordinator.close()
    relay = start_relay(join)
    connect(relay).send(critical())
    started = time.monotonic()
    relay.stop()
    assert time.monotonic() - started < 3.0


def test_the_socket_lies_in_a_private_directory_that_goes_away(start_relay) -> None:
    """Only this user can reach the relay, the path fits a socket, and nothing is left afterwards."""
    relay = start_relay(None)
    path = Path(relay.address.removeprefix("ipc://"))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert len(str(path).encode()) <= downlink.MAX_IPC_PATH
    relay.stop()
    assert not path.parent.exists()


def test_a_long_temporary_path_falls_back_to_a_short_one(tmp_path, monkeypatch, start_relay) -> None:
    """TMPDIR may be longer than a socket path can be."""
    long = tmp_path / ("d" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    relay = start_relay(None)
    assert len(relay.address.removeprefix("ipc://").encode()) <= downlink.MAX_IPC_PATH
    assert list(long.iterdir()) == []


def test_a_full_disk_costs_the_copy_not_the_report(coordinator, start_relay, connect, monkeypatch) -> None:
    """If the spool cannot be written the report still goes to the coordinator, and the failure is counted."""

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    relay = start_relay(coordinator.join)
    monkeypatch.setattr("sentinel.launch.spool.os.fsync", full)
    connect(relay).send(critical())
    coordinator.receive()
    _, reports = coordinator.receive()
    assert reports == [Counted(0, -1, 2, {Drop.SPOOL_FAILED.value: 1}, {})]
