"""The core's front: events in, commands out. When a round is judged, and in which order.

Owns deadlines and order. Same events, same commands: no clock, no sockets (``now`` comes in). What the verdict is, rules decide
(``classify.py``, ``comparisons.py``, ``habits.py``); which incident it belongs to, ``book.py``; which parts make a bundle,
``gathering.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sentinel.incidents import habits
from sentinel.incidents.book import Book
from sentinel.incidents.classify import Quiet, classify
from sentinel.incidents.comparisons import at_end, compare
from sentinel.incidents.counts import TrackerCounts
from sentinel.incidents.events import (
    Acknowledged,
    Command,
    DumpAsked,
    Event,
    Expect,
    Received,
    Release,
    RunEnded,
    SaveIncident,
    Tick,
)
from sentinel.incidents.finding import Finding
from sentinel.incidents.gathering import Gathering
from sentinel.incidents.history import History
from sentinel.incidents.model import Incident, Verdict
from sentinel.incidents.roster import RankState, Roster
from sentinel.incidents.scaler import ScalerHistory
from sentinel.incidents.silence import Silence
from sentinel.incidents.view import View
from sentinel.incidents.window import RoundWindow
from sentinel.wire.messages import (
    Counted,
    Disabled,
    Evidence,
    Goodbye,
    Guarded,
    Hello,
    PartWritten,
    Report,
    RoundClosed,
)

JUDGE_SECONDS = 3.0
"""A round with evidence is judged with what is there once nothing has come for it for this long."""
HEALTHY_SECONDS = 10.0
"""A round without evidence is taken for healthy, though some rank's record is lost, after this long."""
RELEASE_SECONDS = 0.8
"""A rank that said goodbye is let go after this long, whatever is still open."""
LISTEN_SECONDS = 1.0
"""How often all ranks are looked at for one that has stopped."""
RESOLVE_ROUNDS = 20
"""An incident is resolved after this many rounds in a row without evidence."""
MAX_WINDOWS = 256
"""Open windows kept; the oldest healthy one is given up first, and counted."""
KEPT_JUDGED = 16
"""Judged rounds kept, so that reports that come late can still correct their verdict."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """A round that was judged. ``settled``: it was an echo or a recurrence, whose late reports change nothing."""

    window: RoundWindow
    opened: str | None
    settled: bool


class Tracker:
    """All that is known of one run. Feed it events in the order they came; do what its commands say."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.roster = Roster()
        self.counts = TrackerCounts()
        self._book = Book(run_id)
        self._windows: dict[tuple[int, int], RoundWindow] = {}
        self._judged: dict[tuple[int, int], _Judged] = {}
        self._scalers: dict[int, ScalerHistory] = {}
        self._histories: dict[int, History] = {}
        self._gathering = Gathering()
        self._goodbyes: dict[int, tuple[Goodbye, float]] = {}
        self._silences: dict[int, Silence] = {}
        self._listen_due = 0.0
        self._healthy_in_a_row = 0
        self._lessons: dict[tuple[int, int], RoundWindow] = {}
        self._taught = (-1, -1)

    @property
    def world_size(self) -> int:
        """Ranks of the run, 0 while unknown."""
        return self.roster.world_size

    @property
    def ranks(self) -> dict[int, RankState]:
        """State of every rank heard of in the newest attempt."""
        return self.roster.ranks

    @property
    def incidents(self) -> dict[str, Incident]:
        """Incidents by id, newest state."""
        return self._book.incidents

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one event at ``now`` (unix seconds); returns what must be done, in order."""
        match event:
            case Received(report):
                self._receive(report, now)
            case Expect(world_size):
                self.roster.world_size = max(self.roster.world_size, world_size)
            case Tick():
                self.roster.tick(now)
                return self._after(event, self._listen(now), now)
            case RunEnded():
                self.roster.end_all()
            case Acknowledged(incident_id, by, note):
                return [*self._book.acknowledge(incident_id, by, note, now)]
            case DumpAsked(ahead):
                return self._plan_dump(ahead, now)
        return self._after(event, [], now)

    def _after(self, event: Event, commands: list[Command], now: float) -> list[Command]:
        """What follows from all that is known now."""
        ended = isinstance(event, RunEnded)
        commands += self._judge_ready(now, ended) if self._may_be_ready(event, now) else []
        if ended:
            commands += self._confirm_at_end(now)
        if not isinstance(event, Received):
            commands += self._book.save_rest(now, ended=ended)
        commands += self._gathering.commit_ready(now, self.world_size, ended)
        for bundle, ids in list(self._gathering.committed(commands)):
            commands += self._book.attach(bundle, ids, now)
        return commands + self._release_ready(event, now)

    def _plan_dump(self, ahead: int, now: float) -> list[Command]:
        """One round that no rank has closed yet, so that all ranks can write their part of it before its step."""
        present = [rank for rank, state in self.ranks.items() if state.left_at_round is None]
        if not present:
            return []
        newest = max(self.ranks[rank].last_round for rank in present)
        return [self._gathering.plan(self.roster.attempt, newest + ahead, tuple(sorted(present)), now)]

    def _receive(self, report: Report, now: float) -> None:
        self.counts.reports += 1
        self.roster.note(report, now)
        match report:
            case Evidence():
                self._join(report, now)
            case RoundClosed():
                self._history(report.attempt).note_loss(report)
                self._join(report, now)
            case PartWritten():
                self._gathering.part(report, now)
            case Counted():
                self.counts.reported[(report.node, report.rank)] = report
            case Disabled():
                self.counts.unwatched.add(report.rank)
            case Goodbye():
                self._goodbyes[report.rank] = (report, now)

    def _join(self, report: Evidence | RoundClosed, now: float) -> None:
        """Into the round's window; a round that was judged is looked at again only for what it did not have."""
        key = (report.attempt, report.round)
        if key in self._judged:
            if self._judged[key].window.add(report, now):
                self._windows[key] = self._judged[key].window
            return
        if key not in self._windows:
            self._windows[key] = RoundWindow(*key, opened_at=now)
            self._give_up_oldest()
        self._windows[key].add(report, now)

    def _give_up_oldest(self) -> None:
        if len(self._windows) > MAX_WINDOWS:
            healthy = [key for key, window in self._windows.items() if not window.has_evidence]
            if healthy:
                del self._windows[min(healthy)]
                self.counts.windows_given_up += 1

    def _may_be_ready(self, event: Event, now: float) -> bool:
        """A report can make only its own round ready at once; what a rank's end makes ready, the next tick finds."""
        if not isinstance(event, Received) or isinstance(event.report, Hello):
            return True
        if not isinstance(event.report, Evidence | RoundClosed):
            return False
        window = self._windows.get((event.report.attempt, event.report.round))
        return window is not None and self._is_ready(window, now, ended=False)

    def _judge_ready(self, now: float, ended: bool) -> list[Command]:
        """Judge every window that is ready, in order: an echo follows its origin, and a skip the steps before it."""
        commands: list[Command] = []
        waiting: tuple[int, int] | None = None  # the first round with evidence that is not ready
        for key in sorted(self._windows):
            window = self._windows[key]
            if (window.has_evidence and waiting is not None) or not self._is_ready(window, now, ended):
                waiting = key if waiting is None and window.has_evidence else waiting
                continue
            del self._windows[key]
            self._learn_before(key)
            commands += self._judge(key, window, now) if window.has_evidence else self._healthy(key, window, now)
        self._learn_before(waiting)
        return commands

    def _is_ready(self, window: RoundWindow, now: float, ended: bool) -> bool:
        """Every rank that still can has told all; or the wait is over."""
        patience = JUDGE_SECONDS if window.has_evidence else HEALTHY_SECONDS
        if ended or window.attempt < self.roster.attempt or now - window.touched_at > patience:
            return True
        if window.whole < self.roster.present():
            return False
        return not window.incomplete(self.roster.expected(window.round))

    def _healthy(self, key: tuple[int, int], window: RoundWindow, now: float) -> list[Command]:
        if key in self._judged:
            return []
        self.counts.rounds_checked += 1
        history = self._history(window.attempt)
        commands: list[Command] = []
        if not window.incomplete(self.roster.expected(window.round)):
            commands = self._meet_all(compare(window, history), window, now)
        else:
            self._judged[key] = _Judged(window, None, settled=False)
            self._forget_judged()
        self._lessons[key] = window
        commands += self._read_again(key, now)
        if not commands:
            self._healthy_in_a_row += 1
        if self._healthy_in_a_row >= RESOLVE_ROUNDS:
            commands += self._book.resolve_all(window.attempt, now)
        return commands

    def _judge(self, key: tuple[int, int], window: RoundWindow, now: float) -> list[Command]:
        missing = window.incomplete(self.roster.concerned(window.round))
        if key in self._judged:
            return self._judge_again(key, window, missing, now)
        self.counts.rounds_checked += window.is_training
        if window.guarded is not Guarded.NO:
            self.counts.guarded[window.guarded.value] += 1
        self._healthy_in_a_row = 0
        history = self._history(window.attempt)
        echoed = self._book.echoed_by(window)
        if echoed is not None:
            self._judged[key] = _Judged(window, None, settled=True)
            commands: list[Command] = [*self._book.seen_again(echoed, window.round, now)]
        else:
            commands = self._judge_first(key, window, missing, now)
            commands += self._meet_all(habits.judge(window, history), window, now)
            if not missing:
                commands += self._meet_all(compare(window, history), window, now)
            self._lessons[key] = window
        self._forget_judged()
        return commands

    def _forget_judged(self) -> None:
        while len(self._judged) > KEPT_JUDGED:
            del self._judged[min(self._judged)]

    def _judge_first(
        self, key: tuple[int, int], window: RoundWindow, missing: tuple[int, ...], now: float
    ) -> list[Command]:
        outcome = self._outcome(window, missing)
        if isinstance(outcome, Quiet):
            self.counts.quiet[outcome.value] += 1
            self._gathering.unwanted(window.attempt, window.round, now)
            self._judged[key] = _Judged(window, None, settled=False)
            return []
        commands = self._meet(dated(outcome, window), window, now)
        opened = next((c.incident.id for c in commands if isinstance(c, SaveIncident) and c.is_new), None)
        self._judged[key] = _Judged(window, opened, settled=opened is None)
        return commands

    def _judge_again(
        self, key: tuple[int, int], window: RoundWindow, missing: tuple[int, ...], now: float
    ) -> list[Command]:
        """Reports came late for a round that was judged without them."""
        known = self._judged[key]
        if known.settled:
            return []
        outcome = self._outcome(window, missing)
        if known.opened is not None:
            if isinstance(outcome, Quiet):
                return [*self._book.withdraw(known.opened, outcome.value, now)]
            return [*self._book.correct(known.opened, outcome, now)]
        if isinstance(outcome, Quiet) or self._book.echoed_by(window) is not None:
            return []
        return self._judge_first(key, window, missing, now)

    def _read_again(self, key: tuple[int, int], now: float) -> list[Command]:
        """A healthy round was told after a later one's fault, which overtakes on the way: its loss may speak for another cause."""
        commands: list[Command] = []
        for (attempt, number), known in self._judged.items():
            if attempt != key[0] or number < key[1] or known.settled or known.opened is None:
                continue
            outcome = self._outcome(known.window, known.window.incomplete(self.roster.concerned(number)))
            if isinstance(outcome, Verdict) and outcome.rule == self._book.incidents[known.opened].rule:
                commands += self._book.correct(known.opened, outcome, now)
        return commands

    def _outcome(self, window: RoundWindow, missing: tuple[int, ...]) -> Verdict | Quiet:
        history, scaler = self._history(window.attempt), self._scaler(window.attempt)
        return classify(View(window, self._world(window), missing, scaler, history.losses_grew(window.round)))

    def _meet_all(self, found: Iterable[Finding], window: RoundWindow, now: float) -> list[Command]:
        return [command for finding in found for command in self._meet(finding, window, now)]

    def _meet(self, finding: Finding, window: RoundWindow, now: float) -> list[Command]:
        """A finding opens an incident, unless it is the same fault seen again."""
        self._healthy_in_a_row = 0
        same = self._book.same_fault(finding.verdict, window)
        if same is not None:
            return [*self._book.seen_again(same, window.round, now)]
        incident = self._book.open(finding, window, self.world_size, now)
        request = self._gathering.want(incident, tuple(self.roster.expected(window.round)), now)
        saved = self._book.saved(incident, now, is_new=True)
        return [saved] if request is None else [saved, request]

    def _listen(self, now: float) -> list[Command]:
        """Has a rank stopped while the others are there? Nothing is dumped for it: no round of theirs is wrong."""
        if now < self._listen_due:
            return []
        self._listen_due = now + LISTEN_SECONDS
        attempt = self.roster.attempt
        found = self._silences.setdefault(attempt, Silence()).look(self.roster, now)
        if found is None:
            return []
        incident = self._book.open(found, RoundWindow(attempt, found.round, opened_at=now), self.world_size, now)
        return [self._book.saved(incident, now, is_new=True)]

    def _confirm_at_end(self, now: float) -> list[Command]:
        """What still waited for confirmation when the run ended."""
        commands: list[Command] = []
        for attempt, history in self._histories.items():
            for finding in at_end(history):
                commands += self._meet(finding, RoundWindow(attempt, max(finding.round, 0), opened_at=now), now)
            history.drift = None
        return commands

    def _learn_before(self, key: tuple[int, int] | None) -> None:
        """Take in losses and scales of the rounds before ``key`` (None: of all that are judged), in order, each once.

        A healthy round that still lacks some rank's record says enough when a later one is judged.
        """
        if key is not None:
            self._lessons.update((k, w) for k, w in self._windows.items() if k < key and not w.has_evidence)
        for known in sorted(k for k in self._lessons if key is None or k < key):
            window = self._lessons.pop(known)
            if window.closed and known > self._taught:
                self._taught = known
                self._scaler(window.attempt).note(window.closed[min(window.closed)])

    def _history(self, attempt: int) -> History:
        return self._histories.setdefault(attempt, History())

    def _scaler(self, attempt: int) -> ScalerHistory:
        return self._scalers.setdefault(attempt, ScalerHistory())

    def _world(self, window: RoundWindow) -> tuple[int, ...]:
        if self.world_size:
            return tuple(range(self.world_size))
        return tuple(sorted({*self.ranks, *window.closed, *(e.rank for e in window.evidence)}))

    def _release_ready(self, event: Event, now: float) -> list[Command]:
        """Let go whoever may go. Asked on every event of a small world, and on ticks of a large one: each asks all ranks."""
        if not self._goodbyes or (isinstance(event, Received) and len(self.ranks) > SMALL_WORLD):
            return []
        slowest = min((s.last_round for s in self.ranks.values() if s.left_at_round is None), default=None)
        ready = [rank for rank, (bye, at) in self._goodbyes.items() if self._may_go(bye, at, slowest, now)]
        attempts = {rank: self._goodbyes.pop(rank)[0].attempt for rank in ready}
        return [
            Release(attempt, tuple(sorted(r for r in ready if attempts[r] == attempt)))
            for attempt in sorted(set(attempts.values()))
        ]

    def _may_go(self, bye: Goodbye, at: float, slowest: int | None, now: float) -> bool:
        if now - at >= RELEASE_SECONDS:
            return True
        if any(w.has_evidence and w.round <= bye.last_round for w in self._windows.values()):
            return False
        return (slowest is None or slowest >= bye.last_round) and not self._gathering.waits_for(bye.rank)


SMALL_WORLD = 64


def dated(verdict: Verdict, window: RoundWindow) -> Finding:
    """The verdict with its origin: parameters found nonfinite after a step were made so by the step before."""
    step = window.step(verdict.suspect_ranks)
    if verdict.rule == "parameters_after_step" and window.round > 0:
        return Finding(verdict, window.round - 1, max(step - 1, 0))
    return Finding(verdict, window.round, step)
