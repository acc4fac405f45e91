"""The channel: queues that never block, a thread that talks to a real relay socket, and commands that are verified."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_relay import KEY, Relay
from relay_client import closed, wait_until

from sentinel.wire.codec import CLASS_CRITICAL, CLASS_SAMPLE, PROTOCOL, encode_command, frame_class
from sentinel.wire.messages import (
    Alive,
    Check,
    Command,
    Counted,
    Disabled,
    DumpRequest,
    Evidence,
    Goodbye,
    Phase,
    Released,
    Report,
    RoundClosed,
)
from sentinel_agent import channel as channel_module
from sentinel_agent.channel import MAX_SAMPLES, Channel
from sentinel_agent.errors import Health

GOODBYE = Goodbye(0, 3, 5, True)


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    """A relay's socket."""
    relay = Relay(tmp_path)
    yield relay
    relay.close()


class Rank:
    """A channel and what it was told."""

    def __init__(self, address: str) -> None:
        self.commands: list[Command] = []
        self.threads: list[str] = []
        self.health = Health(3, lambda _reason: None)
        self.channel = Channel(address, identity=(0, 3, 0), key=KEY, health=self.health, on_command=self._told)

    def _told(self, command: Command) -> None:
        self.commands.append(command)
        self.threads.append(threading.current_thread().name)


@pytest.fixture
def make_rank() -> Iterator[Callable[[str], Rank]]:
    """Make channels; all are closed after the test."""
    made: list[Rank] = []

    def make(address: str) -> Rank:
        made.append(Rank(address))
        return made[-1]

    yield make
    for rank in made:
        rank.channel.close()


@pytest.fixture
def rank(relay: Relay, make_rank: Callable[[str], Rank]) -> Rank:
    """A connected rank that said hello, so that the relay can answer."""
    rank = make_rank(relay.address)
    rank.channel.start()
    rank.channel.send(Disabled(0, 3, "hello"))
    relay.await_report(Disabled)
    relay.frames.clear()
    return rank


def _evidence(order: int = 0) -> Evidence:
    return Evidence(0, 3, 7, 7, order, Phase.WIRE, time.time(), Check(4, 1, 0, 2.0))


def _request(**changes: Any) -> DumpRequest:
    fields = {"command_id": "c1", "expires_at": time.time() + 60, "attempt": 0, "round": 7}
    return DumpRequest(**{**fields, **changes})


# --- out ---------------------------------------------------------------------------------------------------------------


def test_reports_arrive_in_order(relay: Relay, rank: Rank) -> None:
    """What is sent arrives, each kind in the order it was sent, NaN included."""
    sent = [closed(3, number) for number in range(200)]
    for report in sent:
        rank.channel.send(report)
    wait_until(lambda: relay.take() or len(relay.reports) == 200, "200 reports")
    assert relay.reports == sent
    assert len(relay.frames) < 200
    assert {frame_class(frame) for frame in relay.frames} == {CLASS_SAMPLE}


def test_evidence_goes_first_and_is_marked(relay: Relay, make_rank: Callable[[str], Rank]) -> None:
    """What could lose an incident is sent before the samples, in frames that say so."""
    rank = make_rank(relay.address)
    for number in range(10):
        rank.channel.send(closed(3, number))
    rank.channel.send(_evidence())
    rank.channel.start()
    wait_until(lambda: relay.take() or len(relay.reports) == 11, "11 reports")
    assert isinstance(relay.reports[0], Evidence)
    assert frame_class(relay.frames[0]) == CLASS_CRITICAL


def test_a_rank_is_known_by_attempt_rank_and_process(relay: Relay, rank: Rank) -> None:
    """The relay can tell processes apart."""
    assert relay.peer == f"rank-0-3-{os.getpid()}".encode()


@pytest.mark.parametrize("critical", [False, True], ids=["samples", "evidence"])
def test_a_full_queue_drops_and_counts(monkeypatch: pytest.MonkeyPatch, critical: bool) -> None:
    """Without a thread to empty them the queues stay bounded: the newest are kept, the others counted."""
    monkeypatch.setattr(channel_module, "MAX_SAMPLES", 8)
    monkeypatch.setattr(channel_module, "MAX_CRITICAL", 8)
    monkeypatch.setattr(channel_module, "MAX_HANDED", 3)
    rank = Rank("ipc:///nowhere")
    for number in range(20):
        rank.channel.send(_evidence(number) if critical else closed(3, number))
        assert len(rank.channel._handed) < 3
    rank.channel._sort()
    queue = rank.channel._critical if critical else rank.channel._samples
    assert [r.order if isinstance(r, Evidence) else r.round for r in queue] == list(range(12, 20))  # type: ignore[union-attr]
    assert rank.health.drops == {"channel_full": 12}


def test_a_signal_handler_may_send_while_its_thread_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that interrupts a sender at its sorting, and so sorts the rest itself, hangs nothing and loses nothing."""
    monkeypatch.setattr(channel_module, "MAX_HANDED", 4)
    rank = Rank("ipc:///nowhere")
    interrupted: list[int] = []

    class Interrupted(deque[Report]):
        def popleft(self) -> Report:
            if not interrupted:
                interrupted.append(1)
                rank.channel.send(closed(3, 4))
            return super().popleft()

    rank.channel._handed = Interrupted()
    for number in range(4):
        rank.channel.send(closed(3, number))
    assert interrupted
    assert [r.round for r in rank.channel._samples] == list(range(5))  # type: ignore[union-attr]


def test_without_a_relay_training_goes_on_and_drops_are_counted(
    tmp_path: Path, make_rank: Callable[[str], Rank]
) -> None:
    """With nobody at the other end, samples beyond the socket's queue are dropped and counted, and sending stays instant."""
    rank = make_rank(f"ipc://{tmp_path}/nobody")
    rank.channel.start()
    slowest = 0.0

    def flooded() -> bool:
        nonlocal slowest
        for number in range(2000):
            began = time.perf_counter()
            rank.channel.send(closed(3, number))
            slowest = max(slowest, time.perf_counter() - began)
        return rank.health.drops["relay_full"] > 0

    wait_until(flooded, "a full socket")
    assert slowest < 0.5
    assert rank.health.active


def test_evidence_waits_for_a_relay_that_comes_late(tmp_path: Path, make_rank: Callable[[str], Rank]) -> None:
    """Evidence sent before there is a relay arrives when there is one."""
    rank = make_rank(f"ipc://{tmp_path}/relay")
    rank.channel.start()
    for order in range(3000):
        rank.channel.send(_evidence(order))
    relay = Relay(tmp_path)
    try:
        wait_until(lambda: relay.take() or len(relay.reports) >= 3000, "3000 pieces of evidence")
    finally:
        relay.close()
    assert [r.order for r in relay.reports] == list(range(3000))  # type: ignore[union-attr]
    assert not rank.health.drops


def test_a_report_the_wire_does_not_know_is_lost_alone(relay: Relay, rank: Rank) -> None:
    """A field of a wrong type costs its batch and a count, not the channel."""
    rank.channel.send(RoundClosed(0, 3, 0, 0, "optimizer", object(), 0, 0))  # type: ignore[arg-type]
    wait_until(lambda: rank.health.faults, "a fault")
    rank.channel.send(closed(3, 1))
    assert relay.await_report(RoundClosed).round == 1
    assert rank.health.faults == {"encode:TypeError": 1}


def test_counts_are_reported(relay: Relay, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drops and faults reach the coordinator as totals, again and again, and once more at the end."""
    monkeypatch.setattr(channel_module, "COUNTED_EVERY_SECONDS", 0.01)
    rank.health.drops["check_not_finished"] += 2
    rank.health.faults["wire:ValueError"] += 1
    counted = relay.await_report(Counted)
    assert (counted.attempt, counted.rank, counted.node) == (0, 3, 0)
    assert counted.drops == {"check_not_finished": 2}
    assert counted.faults == {"wire:ValueError": 1}


def test_counts_are_reported_at_the_end(relay: Relay, rank: Rank) -> None:
    """A process that ends soon after a drop still tells of it."""
    rank.health.drops["bundle_limit"] += 1
    rank.channel.close()
    assert relay.await_report(Counted).drops == {"bundle_limit": 1}


def test_nothing_to_count_is_not_reported(relay: Relay, rank: Rank) -> None:
    """A rank without drops or faults sends no totals."""
    rank.channel.send(GOODBYE)
    rank.channel.close()
    relay.await_report(Goodbye)
    relay.take()
    assert not any(isinstance(r, Counted) for r in relay.reports)


# --- back --------------------------------------------------------------------------------------------------------------


def test_a_command_is_handed_over_on_the_channel_s_thread(relay: Relay, rank: Rank) -> None:
    """A signed command arrives as it was sent."""
    relay.command(request := _request())
    wait_until(lambda: rank.commands, "a command")
    assert rank.commands == [request]
    assert rank.threads == ["sentinel-channel"]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (encode_command(_request(), b"\xcd" * 32), "signature"),
        (encode_command(_request(expires_at=1.0), KEY), "expired"),
        (encode_command(_request(), KEY)[:-1] + b"\x00", "signature"),
        (b"S" + bytes([PROTOCOL]) + b"K" + b"\x00" * 64, "signature"),
        (b"S\x63K" + b"\x00" * 64, "protocol"),
        (b"no", "too_short"),
        (b"", "too_short"),
        (b"\x00" * 100, "not_ours"),
    ],
    ids=["another key", "expired", "altered", "forged", "another protocol", "short", "empty", "noise"],
)
def test_what_is_not_a_command_is_counted(relay: Relay, rank: Rank, frame: bytes, reason: str) -> None:
    """A frame that fails verification is refused under its reason, and the next good command is obeyed."""
    relay.raw(frame)
    relay.command(request := _request())
    wait_until(lambda: rank.commands, "the good command")
    assert rank.commands == [request]
    assert rank.health.drops == {f"command_{reason}": 1}
    assert not rank.health.faults
    assert rank.health.active


def test_refused_frames_do_not_switch_the_agent_off(relay: Relay, rank: Rank) -> None:
    """However many forged commands come, the agent goes on watching: they are nobody's fault here."""
    for _ in range(20):
        relay.raw(encode_command(_request(), b"\xcd" * 32))
    relay.command(_request())
    wait_until(lambda: rank.commands, "the good command")
    assert rank.health.guarded("wire", lambda: 1)() == 1
    assert rank.health.guarded("wire", lambda: 1 / 0)() is None
    active = rank.health.active
    assert active


def test_a_command_that_fails_is_not_the_end_of_the_channel(
    relay: Relay, make_rank: Callable[[str], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If acting on a command raises, the channel's death is at least told: the agent switches off loudly."""

    def broken(_self: Rank, _command: Command) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(Rank, "_told", broken)
    rank = make_rank(relay.address)
    rank.channel.start()
    rank.channel.send(closed(3))
    relay.await_report(RoundClosed)
    relay.command(_request())
    wait_until(lambda: not rank.health.active, "switched off")
    assert rank.health.faults == {"channel:ValueError": 1}


# --- the end -----------------------------------------------------------------------------------------------------------


def test_goodbye_waits_for_its_release(relay: Relay, rank: Rank) -> None:
    """The process stays until the coordinator has judged everything, no longer."""
    released: list[bool] = []
    leaving = threading.Thread(target=lambda: released.append(rank.channel.goodbye(GOODBYE, 5.0)))
    leaving.start()
    assert relay.await_report(Goodbye) == GOODBYE
    relay.command(Released("r1", time.time() + 60, 0))
    leaving.join(5)
    assert released == [True]
    assert isinstance(rank.commands[0], Released)


def test_goodbye_does_not_wait_for_ever(relay: Relay, rank: Rank) -> None:
    """Without an answer the process leaves after its patience, with everything sent."""
    began = time.monotonic()
    assert not rank.channel.goodbye(GOODBYE, 0.05)
    assert time.monotonic() - began < 3.0
    assert relay.await_report(Goodbye) == GOODBYE


def test_goodbye_without_a_relay_is_short(tmp_path: Path, make_rank: Callable[[str], Rank]) -> None:
    """A process whose launcher is dead ends within a few seconds."""
    rank = make_rank(f"ipc://{tmp_path}/nobody")
    rank.channel.start()
    began = time.monotonic()
    assert not rank.channel.goodbye(GOODBYE, 0.05)
    assert time.monotonic() - began < 3.0


def test_a_channel_that_was_never_started_can_be_left(tmp_path: Path) -> None:
    """An agent without a relay says goodbye to nobody, at once."""
    rank = Rank(f"ipc://{tmp_path}/nobody")
    assert not rank.channel.goodbye(GOODBYE, 60.0)


def test_closing_twice_is_harmless(rank: Rank) -> None:
    """``detach`` and the interpreter's exit may both close."""
    rank.channel.close()
    rank.channel.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("sentinel")]


def test_evidence_sent_right_before_the_end_arrives(relay: Relay, rank: Rank) -> None:
    """What is queued when the channel closes is sent first."""
    for order in range(500):
        rank.channel.send(_evidence(order))
    rank.channel.close()
    wait_until(lambda: relay.take() or len(relay.reports) == 500, "all evidence")


def test_the_queues_hold_some_rounds() -> None:
    """A frozen relay of a minute does not lose the healthy rounds of a training with many steps per second."""
    assert MAX_SAMPLES >= 60 * 10


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_neither_sends_nor_disturbs(relay: Relay, rank: Rank) -> None:
    """In a child the queues are emptied and nothing is sent; the parent's connection lives."""
    child = os.fork()
    if child == 0:
        rank.channel.forget()
        rank.channel.send(_evidence(99))
        rank.channel.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    rank.channel.send(_evidence(1))
    assert relay.await_report(Evidence).order == 1
    relay.take(50)
    assert [r.order for r in relay.reports] == [1]  # type: ignore[union-attr]


def test_a_rank_with_nothing_to_say_says_that_it_is_alive(relay: Relay) -> None:
    """Whatever the training thread does, a sign of life comes when nothing else was sent for a while."""
    health = Health(3, lambda _reason: None)
    options = {"identity": (0, 3, 0), "key": KEY, "health": health, "alive_seconds": 0.05}
    channel = Channel(relay.address, **options, on_command=print)
    channel.start()
    for _ in range(2):
        assert relay.await_report(Alive) == Alive(0, 3)
        relay.frames.clear()
    channel.close()
    assert health.drops == {}
