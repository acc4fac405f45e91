"""The core's front: events in, commands out. When a round is judged, and which incident a verdict belongs to.

Owns deadlines, order of judgement, echoes and incident states. Same events, same commands: no clock, no sockets (``now`` comes in).
What the verdict is, ``classify.py`` decides; which parts make a bundle, ``gathering.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

from sentinel.incidents import habits
from sentinel.incidents.classify import Quiet, View, classify
from sentinel.incidents.comparisons import at_end, compare
from sentinel.incidents.counts import TrackerCounts
from sentinel.incidents.events import Command, Event, Expect, Received, Release, RunEnded, SaveIncident, Tick
from sentinel.incidents.finding import Finding
from sentinel.incidents.gathering import Gathering
from sentinel.incidents.history import History
from sentinel.incidents.model import Incident, Severity, State, Verdict, utc
from sentinel.incidents.roster import RankState, Roster
from sentinel.incidents.scaler import ScalerHistory
from sentinel.incidents.window import RoundWindow
from sentinel.wire.messages import Counted, Evidence, Goodbye, PartWritten, Phase, Report, RoundClosed
from sentinel.wire.names import bundle_id

JUDGE_SECONDS = 3.0
"""A round with evidence is judged with what is there once nothing has come for it for this long."""
RELEASE_SECONDS = 0.8
"""A rank that said goodbye is let go after this long, whatever is still open."""
SAME_FAULT_ROUNDS = 10
"""The same kind and stage on an overlapping set of ranks within this many rounds is the same fault, seen again."""
RESOLVE_ROUNDS = 20
"""An incident is resolved after this many rounds in a row without evidence."""
SAVE_SECONDS = 1.0
"""A fault that is seen in every round is saved this often."""
MAX_WINDOWS = 256
"""Open windows kept; the oldest healthy one is given up first, and counted."""
KEPT_JUDGED = 16
"""Judged rounds kept, so that reports that come late can still correct their verdict."""


class Tracker:
    """All that is known of one run. Feed it events in the order they came; do what its commands say."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.roster = Roster()
        self.counts = TrackerCounts()
        self.incidents: dict[str, Incident] = {}
        self._windows: dict[tuple[int, int], RoundWindow] = {}
        self._judged: dict[tuple[int, int], tuple[RoundWindow, str | None]] = {}
        self._scalers: dict[int, ScalerHistory] = {}
        self._histories: dict[int, History] = {}
        self._gathering = Gathering()
        self._goodbyes: dict[int, tuple[Goodbye, float]] = {}
        self._healthy_in_a_row = 0
        self._saved_at: dict[str, float] = {}
        self._unsaved: set[str] = set()
        self._over = False

    @property
    def world_size(self) -> int:
        """Ranks of the run, 0 while unknown."""
        return self.roster.world_size

    @property
    def ranks(self) -> dict[int, RankState]:
        """State of every rank heard of in the newest attempt."""
        return self.roster.ranks

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one event at ``now`` (unix seconds); returns what must be done, in order."""
        match event:
            case Received(report):
                self._receive(report, now)
            case Expect(world_size):
                self.roster.world_size = max(self.roster.world_size, world_size)
            case Tick():
                self.roster.tick(now)
            case RunEnded():
                self.roster.end_all()
        ended = isinstance(event, RunEnded)
        commands = self._judge_ready(now, ended)
        if ended:
            self._over = True
            commands += self._confirm_at_end(now)
        commands += self._save_rest(now)
        commands += self._gathering.commit_ready(now, self.world_size, ended)
        commands += self._attach_bundles(now, commands)
        return commands + self._release_ready(now)

    def _confirm_at_end(self, now: float) -> list[Command]:
        """What still waited for confirmation when the run ended."""
        commands: list[Command] = []
        for attempt, history in self._histories.items():
            for finding in at_end(history):
                window = RoundWindow(attempt, max(finding.round, 0), opened_at=now)
                commands += self._meet(finding, window, now)
            history.drift = None
        return commands

    def _receive(self, report: Report, now: float) -> None:
        self.counts.reports += 1
        self.roster.note(report, now)
        match report:
            case Evidence() | RoundClosed():
                self._window(report, now).add(report, now)
            case PartWritten():
                self._gathering.part(report, now)
            case Counted():
                self.counts.reported[(report.node, report.rank)] = report
            case Goodbye():
                self._goodbyes[report.rank] = (report, now)

    def _window(self, report: Evidence | RoundClosed, now: float) -> RoundWindow:
        key = (report.attempt, report.round)
        if key in self._judged:
            window, _ = self._judged[key]
            self._windows.setdefault(key, window)
        if key not in self._windows:
            self._windows[key] = RoundWindow(*key, opened_at=now)
            self._give_up_oldest()
        return self._windows[key]

    def _give_up_oldest(self) -> None:
        if len(self._windows) > MAX_WINDOWS:
            healthy = [key for key, window in self._windows.items() if not window.has_evidence]
            if healthy:
                del self._windows[min(healthy)]
                self.counts.windows_given_up += 1

    def _judge_ready(self, now: float, ended: bool) -> list[Command]:
        """Judge every window that is ready, rounds with evidence strictly in order (an echo must follow its origin)."""
        commands: list[Command] = []
        waiting = False
        for key in sorted(self._windows):
            window = self._windows[key]
            if waiting and window.has_evidence:
                continue
            missing = self._missing_if_ready(window, now, ended)
            if missing is None:
                waiting = waiting or window.has_evidence
                continue
            del self._windows[key]
            commands += self._judge(window, missing, now) if window.has_evidence else self._healthy(window, now)
        return commands

    def _missing_if_ready(self, window: RoundWindow, now: float, ended: bool) -> tuple[int, ...] | None:
        """Ranks missing from a window that may be judged now; None if it should wait."""
        overdue = ended or window.attempt < self.roster.attempt or now - window.touched_at > JUDGE_SECONDS
        everyone_may_be_here = len(window.closed) >= self.roster.present()
        if not (everyone_may_be_here or (overdue and (window.has_evidence or ended))):
            return None
        missing = window.incomplete(self.roster.expected(window.round))
        if not missing or (overdue and (window.has_evidence or ended)):
            return missing
        return missing if window.has_evidence and not set(missing) & set(self.roster.awaited(window.round)) else None

    def _healthy(self, window: RoundWindow, now: float) -> list[Command]:
        self.counts.rounds_checked += 1
        self._note_scaler(window)
        history = self._history(window.attempt)
        history.note_loss(window)
        commands = self._open_all(compare(window, history), window, now)
        if not commands:
            self._healthy_in_a_row += 1
        if self._healthy_in_a_row < RESOLVE_ROUNDS:
            return commands
        stale = [i for i in self.incidents.values() if i.state is not State.RESOLVED and i.attempt <= window.attempt]
        return commands + [
            self._save(i.model_copy(update={"state": State.RESOLVED, "updated_at": utc(now)})) for i in stale
        ]

    def _history(self, attempt: int) -> History:
        return self._histories.setdefault(attempt, History())

    def _open_all(self, found: Iterable[Finding], window: RoundWindow, now: float) -> list[Command]:
        return [command for finding in found for command in self._meet(finding, window, now)]

    def _meet(self, finding: Finding, window: RoundWindow, now: float) -> list[Command]:
        """A finding opens an incident, unless it is the same fault seen again."""
        self._healthy_in_a_row = 0
        same = self._same_fault(finding.verdict, window)
        return self._seen_again(same, window, now) if same is not None else self._open(finding, window, now)

    def _note_scaler(self, window: RoundWindow) -> None:
        if window.closed:
            self._scaler(window.attempt).note(window.closed[min(window.closed)])

    def _scaler(self, attempt: int) -> ScalerHistory:
        return self._scalers.setdefault(attempt, ScalerHistory())

    def _judge(self, window: RoundWindow, missing: tuple[int, ...], now: float) -> list[Command]:
        key = (window.attempt, window.round)
        if key in self._judged:
            return self._correct(window, missing, now)
        self.counts.rounds_checked += 1
        echoed = self._echo_of(window)
        commands: list[Command] = []
        if echoed is not None:
            commands += self._seen_again(echoed, window, now)
        else:
            outcome = self._outcome(window, missing)
            commands += self._act_on(outcome, window, now)
        opened = next((c.incident.id for c in commands if isinstance(c, SaveIncident) and c.is_new), None)
        history = self._history(window.attempt)
        commands += self._open_all(habits.judge(window, history), window, now)
        if not missing:
            commands += self._open_all(compare(window, history), window, now)
        self._note_scaler(window)
        history.note_loss(window)
        self._remember(key, window, opened)
        return commands

    def _outcome(self, window: RoundWindow, missing: tuple[int, ...]) -> Verdict | Quiet:
        history = self._history(window.attempt)
        scaler = self._scaler(window.attempt)
        return classify(View(window, self._world(window), missing, scaler, history.losses_grew))

    def _act_on(self, outcome: Verdict | Quiet, window: RoundWindow, now: float) -> list[Command]:
        if isinstance(outcome, Quiet):
            self.counts.quiet[outcome.value] += 1
            self._gathering.unwanted(window.attempt, window.round, now)
            return []
        return self._meet(dated(outcome, window), window, now)

    def _correct(self, window: RoundWindow, missing: tuple[int, ...], now: float) -> list[Command]:
        """Reports came late for a round that was judged without them: judge again, under the same incident."""
        key = (window.attempt, window.round)
        known = self._judged[key][1]
        outcome = self._outcome(window, missing)
        if isinstance(outcome, Quiet):
            return []
        if known is not None:
            return [self._corrected(self.incidents[known], outcome, now)]
        commands = self._meet(dated(outcome, window), window, now) if self._echo_of(window) is None else []
        self._remember(key, window, next((c.incident.id for c in commands if isinstance(c, SaveIncident)), None))
        return commands

    def _remember(self, key: tuple[int, int], window: RoundWindow, opened: str | None) -> None:
        self._judged[key] = (window, opened)
        while len(self._judged) > KEPT_JUDGED:
            del self._judged[min(self._judged)]

    def _world(self, window: RoundWindow) -> tuple[int, ...]:
        if self.world_size:
            return tuple(range(self.world_size))
        return tuple(sorted({*self.ranks, *window.closed, *(e.rank for e in window.evidence)}))

    def _echo_of(self, window: RoundWindow) -> Incident | None:
        """The earlier incident that had already damaged parameters or buffers at this round's start, if any."""
        damaged = window.of_phase(Phase.PARAMS, Phase.BUFFERS) or any(
            c.params_nonfinite or c.buffers_nonfinite for c in window.closed.values()
        )
        if not damaged:
            return None
        earlier = [i for i in self._of_attempt(window) if i.severity is Severity.CRITICAL and i.round < window.round]
        return max(earlier, key=lambda i: i.round, default=None)

    def _of_attempt(self, window: RoundWindow) -> list[Incident]:
        return [i for i in self.incidents.values() if i.attempt == window.attempt]

    def _same_fault(self, verdict: Verdict, window: RoundWindow) -> Incident | None:
        for incident in self._of_attempt(window):
            alike = (incident.kind, incident.stage) == (verdict.kind, verdict.stage)
            near = 0 <= window.round - incident.last_round <= SAME_FAULT_ROUNDS
            ranks = set(incident.suspect_ranks)
            if alike and near and (ranks & set(verdict.suspect_ranks) or not ranks or not verdict.suspect_ranks):
                return incident
        return None

    def _open(self, finding: Finding, window: RoundWindow, now: float) -> list[Command]:
        incident = self._incident(finding, window, now)
        commands: list[Command] = [self._save(incident, is_new=True)]
        ranks = tuple(self.roster.expected(window.round))
        request = self._gathering.want(incident, ranks, now)
        return commands if request is None else [*commands, request]

    def _incident(self, finding: Finding, window: RoundWindow, now: float) -> Incident:
        return Incident(
            id=f"{bundle_id(window.attempt, finding.round)}-{len(self.incidents) + 1:02d}",
            run_id=self.run_id,
            step=finding.step,
            round=finding.round,
            attempt=window.attempt,
            opened_at=utc(now),
            updated_at=utc(now),
            state=State.OPEN,
            world_size=self.world_size,
            last_round=window.round,
            **{name: getattr(finding.verdict, name) for name in _COPIED},
        )

    def _corrected(self, incident: Incident, verdict: Verdict, now: float) -> SaveIncident:
        changes = {name: getattr(verdict, name) for name in _COPIED}
        return self._save(incident.model_copy(update={**changes, "state": State.UPDATED, "updated_at": utc(now)}))

    def _seen_again(self, incident: Incident, window: RoundWindow, now: float) -> list[Command]:
        """The same fault once more. It is saved at 2, 4, 8, … occurrences and once a second, so that a run that trains on
        with NaN weights for days does not write every round."""
        self._healthy_in_a_row = 0
        seen = incident.model_copy(
            update={
                "occurrences": incident.occurrences + 1,
                "last_round": max(window.round, incident.last_round),
                "state": State.UPDATED,
                "updated_at": utc(now),
            }
        )
        self.incidents[incident.id] = seen
        often = seen.occurrences & (seen.occurrences - 1)
        if often and now - self._saved_at.get(incident.id, 0.0) < SAVE_SECONDS:
            self._unsaved.add(incident.id)
            return []
        return [self._save(seen, now=now)]

    def _save_rest(self, now: float) -> list[Command]:
        """Occurrences that were counted and not saved yet."""
        late = [i for i in sorted(self._unsaved) if now - self._saved_at.get(i, 0.0) >= SAVE_SECONDS or self._over]
        return [self._save(self.incidents[i], now=now) for i in late]

    def _attach_bundles(self, now: float, commands: list[Command]) -> list[Command]:
        """Incidents whose bundle was just committed learn its path."""
        saved: list[Command] = []
        for bundle, ids in self._gathering.committed(commands):
            for incident in (self.incidents[i] for i in ids if self.incidents[i].bundle != bundle):
                saved.append(self._save(incident.model_copy(update={"bundle": bundle, "updated_at": utc(now)})))
        return saved

    def _save(self, incident: Incident, *, is_new: bool = False, now: float = 0.0) -> SaveIncident:
        self.incidents[incident.id] = incident
        self._saved_at[incident.id] = now
        self._unsaved.discard(incident.id)
        return SaveIncident(incident, is_new)

    def _release_ready(self, now: float) -> list[Command]:
        ready = [rank for rank, (bye, at) in self._goodbyes.items() if self._may_go(bye, at, now)]
        attempts = {rank: self._goodbyes.pop(rank)[0].attempt for rank in ready}
        return [
            Release(attempt, tuple(sorted(r for r in ready if attempts[r] == attempt)))
            for attempt in sorted(set(attempts.values()))
        ]

    def _may_go(self, bye: Goodbye, at: float, now: float) -> bool:
        if now - at >= RELEASE_SECONDS:
            return True
        if any(w.has_evidence and w.round <= bye.last_round for w in self._windows.values()):
            return False
        others_there = all(s.last_round >= bye.last_round for s in self.ranks.values() if s.left_at_round is None)
        return others_there and not self._gathering.waits_for(bye.rank)


_COPIED = (
    "kind",
    "severity",
    "stage",
    "attribution",
    "suspect_ranks",
    "parameters",
    "cause",
    "reason",
    "rule",
    "missing_ranks",
    "findings",
)


def dated(verdict: Verdict, window: RoundWindow) -> Finding:
    """The verdict with its origin: parameters found nonfinite after a step were made so by the step before."""
    step = window.step(verdict.suspect_ranks)
    if verdict.rule == "parameters_after_step" and window.round > 0:
        return Finding(verdict, window.round - 1, max(step - 1, 0))
    return Finding(verdict, window.round, step)
