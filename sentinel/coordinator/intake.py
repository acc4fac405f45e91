"""From an admitted message to a run's tracker: which run it is of, whether it came before, what the core says to it.

Owns the set of runs and their lives. Runs on the loop's thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from sentinel.coordinator.actions import Actions
from sentinel.coordinator.admission import Inbound, NotAdmitted, Rejection
from sentinel.coordinator.deliveries import Delivery
from sentinel.coordinator.directories import run_directory
from sentinel.coordinator.faults import Fault, Faults
from sentinel.coordinator.journal import Journal
from sentinel.coordinator.run import Run
from sentinel.coordinator.writer import LogAcknowledged, LogEnded, LogExpect, LogFrame, PutCounts, PutRun
from sentinel.incidents.events import Acknowledged, DumpAsked, Event, Expect, Received, RequestParts, RunEnded, Tick
from sentinel.incidents.model import Incident
from sentinel.wire.codec import FrameRefused, Refusal
from sentinel.wire.messages import Guarded, PartWritten

COUNTS_SECONDS = 5.0
HOUSEKEEPING_SECONDS = 60.0
DUMP_AHEAD_SECONDS = 1.0
"""A command reaches every rank well within this time; a dump is planned so far ahead, and two rounds at least."""


class Intake:
    """All runs of a coordinator. ``only_run`` is the one run an embedded coordinator serves, None for any."""

    def __init__(
        self, journal: Journal, actions: Actions, faults: Faults, *, run_dir: Path, only_run: str | None, max_runs: int
    ) -> None:
        self.runs: dict[str, Run] = {}
        self._journal = journal
        self._actions = actions
        self._faults = faults
        self._run_dir = run_dir
        self._only_run = only_run
        self._max_runs = max_runs
        self._route_users: dict[bytes, str] = {}
        self._counts_due = 0.0
        self._housekeeping_due = 0.0

    def receive(self, inbound: Inbound, now: float) -> None:
        """Take in one message. Raises NotAdmitted or FrameRefused, and then nothing of it was taken in."""
        self._check_route(inbound)
        run = self._run_of(inbound, now)
        if inbound.critical and self._journal.behind:
            raise NotAdmitted(Rejection.BACKLOG)
        if run.note_route(inbound, now):
            self._actions.repeat_open_commands(run, inbound.route, now)
        if inbound.piece is not None:
            self._actions.fetches.take(run, inbound.piece)
            return
        if inbound.critical and self._journal.delivery(inbound) is not Delivery.NEW:
            return
        if run.ended:
            self._reopen(run, now)
        if run.note_world_size(inbound.envelope.world_size):
            self._journal.write(LogExpect(run.run_id, now, inbound.envelope.world_size))
            self._feed(run, [Expect(inbound.envelope.world_size)], now)
        self._log(inbound, now)
        self._feed(run, (Received(report) for report in inbound.reports), now)
        for report in inbound.reports:
            if isinstance(report, PartWritten):
                self._actions.part_written(run, report)

    def _check_route(self, inbound: Inbound) -> None:
        """A connection's id belongs to the key that used it first: a peer may choose any id, but not another's key."""
        owner = self._route_users.setdefault(inbound.route, inbound.user)
        if owner != inbound.user:
            raise NotAdmitted(Rejection.IDENTITY, "connection id of another key")

    def _run_of(self, inbound: Inbound, now: float) -> Run:
        run_id = inbound.envelope.run_id
        if self._only_run is not None and run_id != self._only_run:
            raise FrameRefused(Refusal.UNKNOWN_RUN, run_id)
        run = self.runs.get(run_id)
        if run is not None:
            return run
        self._make_room(now)
        run = Run(run_id, inbound.user, run_directory(self._run_dir, run_id, standalone=self._only_run is None), now)
        self.runs[run_id] = run
        self._journal.write(PutRun(run_id, now, inbound.user))
        return run

    def _make_room(self, now: float) -> None:
        """Forget the run that ended longest ago if there are too many; its rows stay in the database."""
        if len(self.runs) < self._max_runs:
            return
        ended = [run for run in self.runs.values() if run.ended]
        if not ended:
            raise NotAdmitted(Rejection.RUNS, f"{len(self.runs)} runs are going on")
        del self.runs[min(ended, key=lambda run: run.touched_at).run_id]

    def _reopen(self, run: Run, now: float) -> None:
        run.reopen()
        self._journal.write(PutRun(run.run_id, now, run.owner))

    def _log(self, inbound: Inbound, now: float) -> None:
        head = inbound.envelope
        # A healthy frame that the disk has no time for is left out of the log; the core has seen it all the same.
        if inbound.critical or not self._journal.behind:
            self._journal.write(LogFrame(head.run_id, now, head.relay, head.sequence, inbound.critical, inbound.frame))

    def _feed(self, run: Run, events: Iterable[Event], now: float) -> None:
        for event in events:
            commands = self._faults.guard(Fault.CORE, run.feed, event, now)
            if commands:
                self._actions.carry_out(run, commands, now)

    def tick(self, now: float) -> None:
        """Time passed: let every run judge what is overdue, end what is over, keep the counts on disk."""
        for run in self.runs.values():
            if not run.ended:
                self._feed(run, [Tick()], now)
                if run.is_over(now):
                    self._end(run, now)
        self._actions.tick(now)
        if now >= self._counts_due:
            self._counts_due = now + COUNTS_SECONDS
            self._write_counts()
        if now >= self._housekeeping_due:
            self._housekeeping_due = now + HOUSEKEEPING_SECONDS
            self._forget_idle_routes(now)

    def acknowledge(self, run_id: str, word: Acknowledged, now: float) -> Incident | None:
        """A person's word on an incident of a run that is known here; the incident as it is now, None if there is none."""
        run = self.runs.get(run_id)
        if run is None or word.incident_id not in run.tracker.incidents:
            return None
        self._journal.write(LogAcknowledged(run_id, now, word.incident_id, word.by, word.note))
        self._feed(run, [word], now)
        return run.tracker.incidents[word.incident_id]

    def dump_now(self, run_id: str, now: float) -> RequestParts | None:
        """Let every rank of a run write its part of a round about a second ahead. None if the run has no rank to ask."""
        run = self.runs.get(run_id)
        if run is None or run.ended:
            return None
        commands = self._faults.guard(Fault.CORE, run.feed, DumpAsked(_rounds_ahead(run)), now) or []
        self._actions.carry_out(run, commands, now)
        return next((command for command in commands if isinstance(command, RequestParts)), None)

    def adopt(self, run: Run) -> None:
        """Take up a run that was read back from disk."""
        self.runs[run.run_id] = run

    def flush(self) -> None:
        """Hand what was written in this turn to the disk."""
        self._journal.flush()

    @property
    def settled(self) -> bool:
        """True when every acknowledgement is sent and every bundle committed."""
        return self._journal.settled and not self._actions.committing

    def end_all(self, now: float) -> None:
        """The coordinator stops: judge every open window of every run.

        An embedded coordinator's run ends with it. A standalone one's go on without it, so their log stays open, and the next
        start takes them up where they were.
        """
        self._actions.hurry()
        for run in self.runs.values():
            if run.ended:
                continue
            if self._only_run is None:
                self._feed(run, [RunEnded()], now)
            else:
                self._end(run, now)
        self._actions.tick(now)
        self._write_counts()

    def _end(self, run: Run, now: float) -> None:
        self._feed(run, [RunEnded()], now)
        self._journal.write(LogEnded(run.run_id, now))
        run.end(now)

    def _write_counts(self) -> None:
        for run in self.runs.values():
            counts = run.tracker.counts
            totals = {
                "reports": counts.reports,
                "rounds_checked": counts.rounds_checked,
                "benign_skips": counts.benign_skips,
                "guard_skips": counts.guarded[Guarded.SKIPPED.value],
                "unwatched_ranks": len(counts.unwatched),
                "bundles": run.totals.bundles,
                "dump_bytes": run.totals.dump_bytes,
            }
            if run.counts_changed(totals):
                self._journal.write(PutCounts(run.run_id, totals))

    def _forget_idle_routes(self, now: float) -> None:
        for run in self.runs.values():
            run.forget_idle_routes(now)
        live = {route for run in self.runs.values() for route in run.routes}
        self._route_users = {route: user for route, user in self._route_users.items() if route in live}


def _rounds_ahead(run: Run) -> int:
    timed = run.progress.rounds_timed
    seconds = run.progress.round_seconds / timed if timed else DUMP_AHEAD_SECONDS
    return 2 + math.ceil(DUMP_AHEAD_SECONDS / max(seconds, 1e-4))
