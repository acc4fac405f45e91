"""The incidents of a run: opened, seen again, corrected, resolved.

Owns which fault an incident is and how often it is saved. What the fault is, rules decide; when a round is judged, ``tracker.py``.
"""

from __future__ import annotations

from sentinel.incidents.events import SaveIncident
from sentinel.incidents.finding import Finding
from sentinel.incidents.model import Incident, Severity, State, Verdict, utc
from sentinel.incidents.window import RoundWindow
from sentinel.wire.messages import Guarded, Phase
from sentinel.wire.names import bundle_id

SAME_FAULT_ROUNDS = 10
"""The same rule's verdict on an overlapping set of ranks within this many rounds is the same fault, seen again."""
SAVE_SECONDS = 1.0
"""A fault that is seen in every round is saved this often."""
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


class Book:
    """Incidents by id, newest state. Every change comes back as the command that saves it."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.incidents: dict[str, Incident] = {}
        self._saved_at: dict[str, float] = {}
        self._unsaved: set[str] = set()

    def open(self, finding: Finding, window: RoundWindow, world_size: int, now: float) -> Incident:
        """A new incident. Save it with ``saved``."""
        incident = Incident(
            id=f"{bundle_id(window.attempt, finding.round)}-{len(self.incidents) + 1:02d}",
            run_id=self._run_id,
            step=finding.step,
            round=finding.round,
            attempt=window.attempt,
            opened_at=utc(now),
            updated_at=utc(now),
            state=State.OPEN,
            world_size=world_size,
            last_round=window.round,
            guard=window.guarded,
            **_of(finding.verdict),
        )
        self.incidents[incident.id] = incident
        return incident

    def saved(self, incident: Incident, now: float, *, is_new: bool = False) -> SaveIncident:
        """Remember this state and save it."""
        self.incidents[incident.id] = incident
        self._saved_at[incident.id] = now
        self._unsaved.discard(incident.id)
        return SaveIncident(incident, is_new)

    def seen_again(self, incident: Incident, round_: int, now: float) -> list[SaveIncident]:
        """The same fault once more, saved at 2, 4, 8, … occurrences and once a second: a run may train on with NaN for days."""
        last = max(round_, incident.last_round)
        seen = _touched(incident, now, State.UPDATED, occurrences=incident.occurrences + 1, last_round=last)
        self.incidents[incident.id] = seen
        often = seen.occurrences & (seen.occurrences - 1)
        if often and now - self._saved_at.get(incident.id, 0.0) < SAVE_SECONDS:
            self._unsaved.add(incident.id)
            return []
        return [self.saved(seen, now)]

    def save_rest(self, now: float, *, ended: bool) -> list[SaveIncident]:
        """Occurrences that were counted and not saved yet."""
        late = [i for i in sorted(self._unsaved) if ended or now - self._saved_at.get(i, 0.0) >= SAVE_SECONDS]
        return [self.saved(self.incidents[i], now) for i in late]

    def correct(self, known: str, verdict: Verdict, now: float) -> list[SaveIncident]:
        """Late reports changed the verdict. One that they do not change is not saved again."""
        incident = self.incidents[known]
        changes = _of(verdict)
        if all(getattr(incident, name) == value for name, value in changes.items()):
            return []
        state = State.RESOLVED if incident.state is State.RESOLVED else State.UPDATED
        return [self.saved(_touched(incident, now, state, **changes), now)]

    def withdraw(self, known: str, why: str, now: float) -> list[SaveIncident]:
        """Late reports explain the round without a fault: the incident is resolved, and says so."""
        incident = self.incidents[known]
        if incident.state is State.RESOLVED:
            return []
        reason = f"{incident.reason}; withdrawn, late reports explain it: {why}"
        return [self.saved(_touched(incident, now, State.RESOLVED, reason=reason), now)]

    def resolve_all(self, attempt: int, now: float) -> list[SaveIncident]:
        """Enough healthy rounds in a row since."""
        open_ = [i for i in self.incidents.values() if i.state is not State.RESOLVED and i.attempt <= attempt]
        return [self.saved(_touched(i, now, State.RESOLVED), now) for i in open_]

    def acknowledge(self, known: str, by: str, note: str, now: float) -> list[SaveIncident]:
        """A person has seen it. An unknown incident changes nothing; a later word replaces an earlier one."""
        incident = self.incidents.get(known)
        if incident is None:
            return []
        word = {"acknowledged_at": utc(now), "acknowledged_by": by, "acknowledged_note": note}
        return [self.saved(_touched(incident, now, incident.state, **word), now)]

    def attach(self, bundle: str, ids: tuple[str, ...], now: float) -> list[SaveIncident]:
        """These incidents' bundle was committed at ``bundle``, relative to the run directory."""
        found = (self.incidents[i] for i in ids)
        return [self.saved(_touched(i, now, i.state, bundle=bundle), now) for i in found if i.bundle != bundle]

    def same_fault(self, verdict: Verdict, window: RoundWindow) -> Incident | None:
        """The incident that this verdict is of, seen again."""
        ranks = set(verdict.suspect_ranks)
        for incident in self._of_attempt(window.attempt):
            near = 0 <= window.round - incident.last_round <= SAME_FAULT_ROUNDS
            overlaps = bool(ranks & set(incident.suspect_ranks)) or not ranks or not incident.suspect_ranks
            if near and overlaps and (incident.kind, incident.rule) == (verdict.kind, verdict.rule):
                return incident
        return None

    def echoed_by(self, window: RoundWindow) -> Incident | None:
        """The earlier incident that had already damaged parameters or buffers at this round's start, if any."""
        damaged = window.of_phase(Phase.PARAMS, Phase.BUFFERS) or any(
            c.params_nonfinite for c in window.closed.values()
        )
        if not damaged:
            return None
        earlier = [i for i in self._of_attempt(window.attempt) if _can_damage(i) and i.round < window.round]
        return max(earlier, key=lambda i: i.round, default=None)

    def _of_attempt(self, attempt: int) -> list[Incident]:
        return [i for i in self.incidents.values() if i.attempt == attempt]


def _can_damage(incident: Incident) -> bool:
    """A step that the guard left out has damaged nothing."""
    return incident.severity is Severity.CRITICAL and incident.guard not in (Guarded.SKIPPED, Guarded.HALTED)


def _of(verdict: Verdict) -> dict[str, object]:
    return {name: getattr(verdict, name) for name in _COPIED}


def _touched(incident: Incident, now: float, state: State, **changes: object) -> Incident:
    return incident.model_copy(update={**changes, "state": state, "updated_at": utc(now)})
