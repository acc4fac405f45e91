"""What a relay keeps, drops and sends again."""

from __future__ import annotations

from sentinel.launch import outbox
from sentinel.launch.outbox import Drop, Outbox


def _sequences(box: Outbox, now: float) -> list[int]:
    return [sequence for sequence, _ in box.due(now, limit=100)]


def test_the_newest_samples_win_and_the_lost_are_counted(monkeypatch) -> None:
    """A full queue drops its oldest samples, under the reason that holds: too slow, or not connected."""
    monkeypatch.setattr(outbox, "MAX_SAMPLES", 3)
    box = Outbox()
    for number in range(5):
        box.add_sample(b"e", b"%d" % number, connected=number < 4)
    assert box.next_sample() == (b"e", b"2")
    assert box.drops == {Drop.RELAY_FULL: 1, Drop.COORDINATOR_UNREACHABLE: 1}


def test_samples_are_bounded_in_bytes(monkeypatch) -> None:
    """Large samples make way by size too, not only by number."""
    monkeypatch.setattr(outbox, "MAX_SAMPLE_BYTES", 10)
    box = Outbox()
    for _ in range(3):
        box.add_sample(b"", b"x" * 4, connected=True)
    assert box.waiting_samples == 2
    assert box.drops == {Drop.RELAY_FULL: 1}


def test_samples_leave_in_order_and_free_their_room(monkeypatch) -> None:
    """A sample that was sent is forgotten, and its bytes are free again."""
    monkeypatch.setattr(outbox, "MAX_SAMPLE_BYTES", 4)
    box = Outbox()
    for frame in (b"aaaa", b"bbbb"):
        box.add_sample(b"", frame, connected=True)
        assert box.next_sample() == (b"", frame)
        box.sample_sent()
    assert box.next_sample() is None
    assert not box.drops


def test_critical_frames_are_due_again_until_acknowledged() -> None:
    """Without an acknowledgement a critical frame is sent again, each time later, and never forgotten."""
    box = Outbox()
    box.add_critical(1, b"e", b"f", now=0.0)
    sent_at = []
    for tenth in range(1000):
        if _sequences(box, tenth / 10):
            sent_at.append(tenth / 10)
            box.sent(1, tenth / 10)
    assert sent_at == [0.0, 2.0, 6.0, 14.0, 30.0, 60.0, 90.0]
    assert box.unacknowledged == 1
    assert box.acknowledge(1)
    assert not box.acknowledge(1)
    assert _sequences(box, 1e9) == []


def test_a_renewed_connection_makes_everything_due() -> None:
    """What was in flight when a connection broke is sent again at once, in order."""
    box = Outbox()
    for sequence in (1, 2, 3):
        box.add_critical(sequence, b"", b"", now=0.0)
        box.sent(sequence, 0.0)
    box.acknowledge(2)
    assert _sequences(box, 0.1) == []
    box.connection_renewed(0.1)
    assert _sequences(box, 0.1) == [1, 3]


def test_the_oldest_critical_frames_win(monkeypatch) -> None:
    """When critical frames find no room the newer one is refused and counted: the origin of a fault is the older."""
    monkeypatch.setattr(outbox, "MAX_CRITICAL", 2)
    box = Outbox()
    assert [box.add_critical(n, b"", b"", now=0.0) for n in (1, 2, 3)] == [True, True, False]
    assert box.drops == {Drop.CRITICAL_FULL: 1}
    box.acknowledge(1)
    assert box.add_critical(4, b"", b"", now=0.0)


def test_critical_frames_are_bounded_in_bytes(monkeypatch) -> None:
    """Few but large critical frames are bounded too, and an acknowledgement frees their bytes."""
    monkeypatch.setattr(outbox, "MAX_CRITICAL_BYTES", 10)
    box = Outbox()
    assert box.add_critical(1, b"", b"x" * 8, now=0.0)
    assert not box.add_critical(2, b"", b"x" * 8, now=0.0)
    box.acknowledge(1)
    assert box.add_critical(3, b"", b"x" * 8, now=0.0)


def test_samples_left_at_the_end_are_counted() -> None:
    """Samples that never found a connection are losses with a reason, not silence."""
    box = Outbox()
    box.add_sample(b"", b"a", connected=False)
    box.add_sample(b"", b"b", connected=False)
    box.abandon_samples()
    assert box.drops == {Drop.COORDINATOR_UNREACHABLE: 2}
    assert box.waiting_samples == 0
