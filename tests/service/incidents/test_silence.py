"""A rank that stops while the others are there is told once; a slow job, a sleeping coordinator and an orderly end are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from sentinel.incidents.events import Received, SaveIncident, Tick
from sentinel.incidents.model import Attribution, Incident, Kind, Severity, Stage
from sentinel.incidents.silence import SILENT_SECONDS
from sentinel.incidents.tracker import Tracker
from sentinel.wire.messages import Alive, ClosedBy, Disabled, Goodbye, Hello, NodeEnded, Report, RoundClosed

START = 1e9


class Job:
    """A job of ``size`` ranks whose time the test tells; ticks come as the coordinator's do."""

    def __init__(self, size: int = 4) -> None:
        self.tracker = Tracker("run")
        self.now = START
        self.told: list[Incident] = []
        for rank in range(size):
            self.hear(Hello(0, rank, rank, rank // 2, size, 1, "host", "0", "2", START))
            self.hear(RoundClosed(0, rank, 7, 7, ClosedBy.OPTIMIZER, START, 0, 1, loss=1.0))

    def hear(self, report: Report) -> None:
        """A report comes."""
        self._keep(self.tracker.handle(Received(report), self.now))

    def pass_time(self, seconds: float, *, alive: Iterable[int] = (), every: float = 1.0) -> None:
        """Time passes with a tick ``every`` so often, and signs of life of some ranks every ten seconds."""
        until, alive_due = self.now + seconds, self.now
        while self.now < until:
            self.now += every
            if self.now >= alive_due:
                alive_due = self.now + 10.0
                for rank in alive:
                    self.hear(Alive(0, rank))
            self._keep(self.tracker.handle(Tick(), self.now))

    def _keep(self, commands: Iterable[object]) -> None:
        self.told += [c.incident for c in commands if isinstance(c, SaveIncident) and c.is_new]


def test_a_rank_that_goes_silent_is_told_once() -> None:
    """Rule rank_silent: two minutes without a sign of life of rank 2, while the others wait in the collective."""
    job = Job()
    job.pass_time(SILENT_SECONDS - 2, alive=(0, 1, 3))
    assert job.told == []
    job.pass_time(600, alive=(0, 1, 3))
    (incident,) = job.told
    assert (incident.kind, incident.stage, incident.severity) == (Kind.RANK_SILENT, Stage.NONE, Severity.WARNING)
    assert (incident.attribution, incident.suspect_ranks) == (Attribution.RANK_LOCAL, (2,))
    assert (incident.rule, incident.step, incident.round) == ("rank_silent", 8, 8)
    assert "3 other ranks are still there" in incident.reason
    assert incident.bundle is None


def test_others_that_wait_show_how_far_a_rank_came() -> None:
    """Its last rounds may not have left it, but the others closed them with it; if they go on without it, its own word counts."""
    for goes_on, step in ((False, 10), (True, 8)):
        job = Job()
        for round_ in (8, 9):
            for rank in (0, 1, 3):
                job.hear(RoundClosed(0, rank, round_, round_, ClosedBy.OPTIMIZER, START, 0, 1, loss=1.0))
        job.pass_time(SILENT_SECONDS - 10, alive=(0, 1, 3))
        if goes_on:
            for rank in (0, 1, 3):
                job.hear(RoundClosed(0, rank, 10, 10, ClosedBy.OPTIMIZER, START, 0, 1, loss=1.0))
        job.pass_time(20, alive=(0, 1, 3))
        assert [i.step for i in job.told] == [step]


def test_a_rank_that_comes_back_may_go_again() -> None:
    """It is told anew only after it was heard in between."""
    job = Job()
    job.pass_time(SILENT_SECONDS + 5, alive=(0, 1, 3))
    job.pass_time(30, alive=(0, 1, 2, 3))
    job.pass_time(SILENT_SECONDS + 20, alive=(0, 1, 3))
    assert [i.suspect_ranks for i in job.told] == [(2,), (2,)]


def test_of_two_ranks_the_silent_one_is_told() -> None:
    """No majority is needed: the other one is there."""
    job = Job(2)
    job.pass_time(SILENT_SECONDS + 5, alive=(0,))
    assert [i.suspect_ranks for i in job.told] == [(1,)]


def test_a_rank_that_raised_and_left_the_others_waiting_is_told() -> None:
    """Its goodbye said that it ended by an exception; two minutes later the others still wait for it."""
    job = Job()
    job.hear(Goodbye(0, 1, 7, False, "ValueError: planted"))
    job.pass_time(SILENT_SECONDS + 5, alive=(0, 2, 3))
    (incident,) = job.told
    assert incident.suspect_ranks == (1,)
    assert "raised and left" in incident.reason


HEALTHY: dict[str, Callable[[Job], None]] = {
    "a step of an hour": lambda job: job.pass_time(3600, alive=(0, 1, 2, 3)),
    "all fall silent": lambda job: job.pass_time(600),
    "most fall silent: it is the network between us": lambda job: job.pass_time(600, alive=(0,)),
    "an orderly end of one": lambda job: (
        job.hear(Goodbye(0, 2, 7, True)),
        job.pass_time(600, alive=(0, 1, 3)),
    )[-1],
    "an agent that switched itself off": lambda job: (
        job.hear(Disabled(0, 2, "faults")),
        job.pass_time(600, alive=(0, 1, 3)),
    )[-1],
    "a node that ended": lambda job: (job.hear(NodeEnded(0, 1, 0)), job.pass_time(600, alive=(0, 1)))[-1],
    "a rank that raised, and the job with it": lambda job: (
        job.hear(Goodbye(0, 2, 7, False, "ValueError")),
        job.hear(NodeEnded(0, 0, 1)),
        job.hear(NodeEnded(0, 1, 1)),
        job.pass_time(600),
    )[-1],
}


@pytest.mark.parametrize("story", HEALTHY, ids=str)
def test_none_of_these_is_told(story: str) -> None:
    """Long steps, lost networks, orderly ends and agents that are off raise nothing."""
    job = Job()
    HEALTHY[story](job)
    assert job.told == []


def test_a_coordinator_that_did_not_listen_accuses_nobody() -> None:
    """After a suspended machine wakes up, reports come in one after the other: nobody was silent."""
    job = Job()
    job.now += 4000.0
    for rank in (0, 1, 3):
        job.hear(Alive(0, rank))
        job.pass_time(1.0, alive=())
    job.pass_time(20, alive=(0, 1, 2, 3))
    assert job.told == []


def test_a_new_attempt_begins_anew() -> None:
    """Ranks of an attempt that was given up are not missed in the next one."""
    job = Job()
    job.pass_time(100, alive=(0, 1, 3))
    for rank in range(4):
        job.hear(Hello(1, rank, rank, rank // 2, 4, 1, "host", "0", "2", job.now))
    job.pass_time(60)
    assert job.told == []
