"""The ROUTER with real CURVE connections: who gets in, what is counted, when it is acknowledged."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable

import pytest
import zmq
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from relay_client import RelayClient, closed, evidence, fault_of, hello, wait_until

from sentinel.coordinator.app import Coordinator
from sentinel.coordinator.config import CoordinatorSettings
from sentinel.coordinator.server import ServerUnavailable
from sentinel.wire.codec import PROTOCOL, encode_reports
from sentinel.wire.link import Envelope, encode_envelope
from sentinel.wire.messages import DumpRequest, Goodbye, Released

MakeRelay = Callable[..., RelayClient]


def rejected(coordinator: Coordinator) -> dict[str, int]:
    """Refused messages by reason."""
    return dict(coordinator.snapshot().rejected)


def test_a_fault_becomes_an_incident_on_disk_and_every_critical_frame_is_acknowledged(
    coordinator: Coordinator, relays: MakeRelay
) -> None:
    """Evidence of one rank ends as one incident naming that rank, and its frame is acknowledged."""
    relay = relays(coordinator.join)
    relay.send([hello(0), hello(1)])
    sequence = relay.send(fault_of(1))
    relay.await_ack(sequence)
    [incident] = coordinator.incidents("run")
    assert incident.suspect_ranks == (1,)
    assert incident.kind == "nonfinite_gradient"


def test_samples_are_not_acknowledged(coordinator: Coordinator, relays: MakeRelay) -> None:
    """A healthy frame costs no answer: only critical ones are acknowledged."""
    relay = relays(coordinator.join)
    sample = relay.send([hello(0), closed(0)])
    critical = relay.send([evidence(0)])
    relay.await_ack(critical)
    assert sample not in relay.acks


def test_no_acknowledgement_before_the_commit(
    coordinator: Coordinator, relays: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk has not committed, the relay hears nothing, however long that takes."""
    release = threading.Event()
    commit = coordinator._writer._commit

    def slow_commit(batch: list) -> bool:  # type: ignore[type-arg]
        release.wait(10)
        return commit(batch)

    monkeypatch.setattr(coordinator._writer, "_commit", slow_commit)
    relay = relays(coordinator.join)
    sequence = relay.send(fault_of(1))
    wait_until(
        lambda: coordinator.snapshot().runs and coordinator.snapshot().runs[0].reports == 3, "the report was handled"
    )
    relay.listen(200)
    assert relay.acks == []
    assert coordinator.incidents() == []
    release.set()
    relay.await_ack(sequence)
    assert len(coordinator.incidents()) == 1


def test_a_failing_disk_is_retried_and_acknowledged_late(
    coordinator: Coordinator, relays: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit the disk refuses is tried again, counted, and only then acknowledged."""
    commit = coordinator._writer._commit
    failures = iter([True, True])
    monkeypatch.setattr(coordinator._writer, "_commit", lambda batch: not next(failures, False) and commit(batch))
    relay = relays(coordinator.join)
    relay.await_ack(relay.send([evidence(0)]))
    assert coordinator.snapshot().faults["store_write"] == 2


def test_a_frame_delivered_twice_is_one_event_and_two_acknowledgements(
    coordinator: Coordinator, relays: MakeRelay
) -> None:
    """A resend after a lost acknowledgement is acknowledged again and changes nothing."""
    relay = relays(coordinator.join)
    sequence = relay.send(fault_of(1))
    relay.await_ack(sequence)
    relay.acks.clear()
    relay.send(fault_of(1), sequence)
    relay.await_ack(sequence)
    assert coordinator.snapshot().runs[0].reports == 3
    assert coordinator.incidents()[0].occurrences == 1


def test_an_unknown_client_key_is_refused(coordinator: Coordinator, relays: MakeRelay) -> None:
    """A peer with a key pair of its own never gets a report in, and is counted as denied."""
    stranger = relays(coordinator.join, keys=zmq.curve_keypair())
    stranger.knock()
    wait_until(lambda: coordinator.snapshot().denied_connections > 0, "the handshake is refused")
    assert coordinator.snapshot().runs == ()


def test_a_wrong_server_key_is_refused(coordinator: Coordinator, relays: MakeRelay) -> None:
    """A client that expects another coordinator does not talk to this one."""
    mistaken = relays(coordinator.join.model_copy(update={"server_key": zmq.curve_keypair()[0].decode()}))
    mistaken.knock()
    known = relays(coordinator.join, relay="known")
    known.await_ack(known.send([evidence(0)]))
    assert coordinator.snapshot().runs[0].reports == 1


def test_a_plaintext_client_is_refused(coordinator: Coordinator, relays: MakeRelay) -> None:
    """Without CURVE nothing is delivered."""
    plain = zmq.Context.instance().socket(zmq.DEALER)
    plain.linger = 0
    plain.connect(coordinator.join.endpoint)
    with contextlib.suppress(zmq.Again):
        plain.send_multipart([encode_envelope(Envelope("run", 0, "r", 1, 2)), encode_reports([hello(0)])], zmq.NOBLOCK)
    known = relays(coordinator.join, relay="known")
    known.await_ack(known.send([evidence(0)]))
    assert coordinator.snapshot().runs[0].reports == 1
    plain.close()


def test_a_revoked_key_is_not_heard_any_more(coordinator: Coordinator, relays: MakeRelay) -> None:
    """Revoking a key holds for connections that are already open."""
    public, secret = zmq.curve_keypair()
    coordinator._allowed.allow(public.decode())
    relay = relays(coordinator.join, keys=(public, secret))
    relay.await_ack(relay.send([evidence(0)]))
    coordinator._allowed.revoke(public.decode())
    relay.send([evidence(1)])
    wait_until(lambda: rejected(coordinator).get("revoked"), "the frame is refused")


def test_an_impostor_with_another_key_speaks_neither_for_the_connection_nor_for_the_run(
    coordinator: Coordinator, relays: MakeRelay
) -> None:
    """Identity is the CURVE key: the same routing id and the same run id under another allowed key are refused."""
    public, secret = zmq.curve_keypair()
    coordinator._allowed.allow(public.decode())
    genuine = relays(coordinator.join, relay="relay-7")
    genuine.await_ack(genuine.send([evidence(0)]))
    same_id = relays(coordinator.join, relay="relay-7", keys=(public, secret))
    same_id.send(fault_of(1))
    wait_until(lambda: rejected(coordinator).get("identity") == 1, "the taken-over id is refused")
    other_id = relays(coordinator.join, relay="relay-8", keys=(public, secret))
    other_id.send(fault_of(1))
    wait_until(lambda: rejected(coordinator).get("identity") == 2, "the claimed run is refused")
    assert coordinator.snapshot().runs[0].reports == 1


def test_frames_of_another_protocol_version_are_counted(coordinator: Coordinator, relays: MakeRelay) -> None:
    """An outdated or newer agent is refused by a named reason, and its neighbour goes on."""
    relay = relays(coordinator.join)
    frame = bytearray(encode_reports([hello(0)]))
    frame[1] = PROTOCOL + 1
    relay.send_raw(relay.envelope(1), bytes(frame))
    relay.await_ack(relay.send([evidence(0)], 2))
    assert rejected(coordinator) == {"protocol": 1}


def test_frames_of_another_run_are_refused_by_an_embedded_coordinator(
    coordinator: Coordinator, relays: MakeRelay
) -> None:
    """An embedded coordinator serves its own run only."""
    relays(coordinator.join, run_id="another").send([hello(0)])
    wait_until(lambda: rejected(coordinator) == {"unknown_run": 1}, "the frame is refused")


def test_numbers_no_job_has_are_refused(coordinator: Coordinator, relays: MakeRelay) -> None:
    """A world of 2**60 ranks must not become a list of 2**60 ranks."""
    relay = relays(coordinator.join)
    relay.send([hello(0, world_size=1 << 60)])
    relay.send([hello(1 << 60)])
    relay.send([closed(0, round_=1 << 62)])
    wait_until(lambda: rejected(coordinator) == {"bounds": 3}, "all three are refused")


def test_hostile_frames_are_counted_and_do_no_harm(coordinator: Coordinator, relays: MakeRelay) -> None:
    """Whatever parts arrive, each is refused or taken in, and the loop goes on without a fault."""
    relay = relays(coordinator.join)
    good = encode_reports([hello(0)])
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def mutated(frame: bytes) -> bytes:
        changed = bytearray(frame)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed[: rng.randint(1, len(changed))])

    for number in range(300):
        relay.send_raw(mutated(relay.envelope(number)), mutated(good))
    for parts in ([b""], [b"", b""], [b"a", b"b", b"c"], [relay.envelope(1)], [b"x" * 2000, good]):
        relay.send_raw(*parts)

    @hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.binary(max_size=64), min_size=1, max_size=4))
    def send(parts: list[bytes]) -> None:
        relay.send_raw(*parts)

    send()
    relay.run_id = "run"
    relay.await_ack(relay.send([evidence(0)], 1 << 40))
    taken = coordinator.snapshot()
    assert sum(taken.rejected.values()) > 300
    assert not any(taken.faults.values())


def test_a_message_that_raises_is_counted_and_does_not_stop_the_loop(
    coordinator: Coordinator, relays: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the core costs one event, is counted, and the frame is still kept and acknowledged."""
    relay = relays(coordinator.join)
    relay.await_ack(relay.send([evidence(0)]))
    tracker = coordinator._intake.runs["run"].tracker
    handle = tracker.handle
    monkeypatch.setattr(tracker, "handle", lambda event, now: 1 / 0)
    relay.await_ack(relay.send([evidence(1)]))
    monkeypatch.setattr(tracker, "handle", handle)
    relay.await_ack(relay.send([evidence(0, 5)]))
    assert coordinator.snapshot().faults["core"] > 0


def test_ranks_are_asked_for_their_parts_and_let_go_by_signed_commands(
    coordinator: Coordinator, relays: MakeRelay
) -> None:
    """An incident asks every rank for its part; a goodbye is answered. Both are signed for the ranks."""
    relay = relays(coordinator.join)
    relay.send([hello(0), hello(1)])
    relay.send(fault_of(1, round_=3))
    request = relay.await_command(DumpRequest)
    assert isinstance(request, DumpRequest)
    assert (request.round, request.ranks) == (3, (0, 1))
    relay.send([Goodbye(0, 0, 3, clean=True), Goodbye(0, 1, 3, clean=True)])
    assert isinstance(relay.await_command(Released), Released)


def test_a_relay_that_reconnects_gets_the_commands_it_missed(coordinator: Coordinator, relays: MakeRelay) -> None:
    """A command sent while a relay was away reaches it when it speaks again."""
    first = relays(coordinator.join)
    first.await_ack(first.send(fault_of(1)))
    second = relays(coordinator.join, relay="relay-after-restart")
    second.send([hello(0)])
    assert isinstance(second.await_command(DumpRequest), DumpRequest)


def test_stop_takes_what_has_arrived_and_judges_open_rounds(settings: CoordinatorSettings, relays: MakeRelay) -> None:
    """A round that is still open when the run ends is judged with what is there, and stop returns in time."""
    coordinator = Coordinator(settings).start()
    relay = relays(coordinator.join)
    relay.send([hello(0), hello(1)])
    relay.await_ack(relay.send([evidence(1)]))
    assert coordinator.incidents() == []
    started = time.monotonic()
    assert coordinator.stop(10)
    assert time.monotonic() - started < 5
    [incident] = coordinator.incidents()
    assert incident.suspect_ranks == (1,)


def test_a_port_that_is_taken_is_one_clear_error(coordinator: Coordinator, settings: CoordinatorSettings) -> None:
    """Binding where somebody listens says so in one line and leaves nothing behind."""
    taken = settings.model_copy(update={"bind": coordinator.join.endpoint, "run_dir": settings.run_dir / "second"})
    with pytest.raises(ServerUnavailable, match="cannot listen on tcp://127"):
        Coordinator(taken).start()
    Coordinator(taken.model_copy(update={"bind": "tcp://127.0.0.1:0"})).start().stop()
