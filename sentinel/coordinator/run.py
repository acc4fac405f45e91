"""One run as the coordinator holds it: its tracker, the connections its reports come by, its totals and its end.

Owns the run's state. Decides nothing about faults (the tracker does) and touches neither sockets nor disk.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from sentinel.coordinator.admission import Inbound, NotAdmitted, Rejection
from sentinel.coordinator.progress import Progress
from sentinel.coordinator.totals import Totals
from sentinel.incidents.events import Command, Event, Received
from sentinel.incidents.tracker import Tracker
from sentinel.wire.messages import Hello, NodeEnded, Report

END_AFTER_SECONDS = 30.0
"""A run whose every node has ended is over after this long without a report (a restart would have reported by then)."""
RUN_IDLE_SECONDS = 24 * 3600.0
"""A run that nobody ended is over after this long without a report."""
ROUTE_IDLE_SECONDS = 600.0
MAX_OPEN_COMMANDS = 64


@dataclass(slots=True)
class Route:
    """One connection of a relay. ``user`` is the CURVE key it was made with."""

    user: str
    node: int
    last_at: float


@dataclass(frozen=True, slots=True)
class OpenCommand:
    """A signed command frame that relays which connect before it expires must get too."""

    expires_at: float
    frame: bytes


class Run:
    """State of one run. ``owner`` is the public key that first spoke for it; no other key may."""

    def __init__(self, run_id: str, owner: str, directory: Path, now: float) -> None:
        self.run_id = run_id
        self.owner = owner
        self.directory = directory
        self.started_at = now
        self.touched_at = now
        self.ended = False
        self.tracker = Tracker(run_id)
        self.totals = Totals()
        self.progress = Progress()
        self.ended_at = 0.0
        self.bundle_roots: dict[str, Path] = {}  # bundle id -> the directory whose bundles/ it is in
        self.routes: dict[bytes, Route] = {}
        self.commands: deque[OpenCommand] = deque(maxlen=MAX_OPEN_COMMANDS)
        self._expected = 0
        self._counts: dict[str, int] = {}
        self._nodes: dict[int, int | None] = {}  # node -> attempt that ended there, None while it runs

    def note_route(self, inbound: Inbound, now: float) -> bool:
        """Remember where answers to this node go; True if the connection is new. Raises NotAdmitted for another's key."""
        if inbound.user != self.owner:
            raise NotAdmitted(Rejection.IDENTITY, f"run {self.run_id}")
        self._nodes.setdefault(inbound.envelope.node, None)
        known = inbound.route in self.routes
        self.routes[inbound.route] = Route(inbound.user, inbound.envelope.node, now)
        return not known

    def note_world_size(self, world_size: int) -> bool:
        """True if a launcher named a larger world than any before."""
        larger = world_size > self._expected
        self._expected = max(self._expected, world_size)
        return larger

    def feed(self, event: Event, now: float) -> list[Command]:
        """The tracker's commands for one event; the time it took is counted."""
        if isinstance(event, Received):
            self._note(event.report, now)
        started = time.perf_counter()
        commands = self.tracker.handle(event, now)
        self.totals.classify_seconds += time.perf_counter() - started
        self.totals.classify_calls += 1
        if isinstance(event, Received):
            self.progress.note(event.report, self.tracker.world_size)
        return commands

    def _note(self, report: Report, now: float) -> None:
        self.touched_at = now
        self.totals.note(report, now)
        if isinstance(report, NodeEnded):
            self._nodes[report.node] = report.attempt
        elif isinstance(report, Hello):
            ended = self._nodes.get(report.node)
            self._nodes[report.node] = ended if ended is not None and ended >= report.attempt else None

    def is_over(self, now: float) -> bool:
        """True once every node heard of has ended and nothing came for a while, or nothing came for very long."""
        all_ended = bool(self._nodes) and all(attempt is not None for attempt in self._nodes.values())
        return now - self.touched_at > (END_AFTER_SECONDS if all_ended else RUN_IDLE_SECONDS)

    def end(self, now: float) -> None:
        """No more reports are expected."""
        self.ended = True
        self.ended_at = now

    def reopen(self) -> None:
        """Reports came after the end: the job was restarted."""
        self.ended = False
        self._nodes = dict.fromkeys(self._nodes)

    def counts_changed(self, counts: dict[str, int]) -> bool:
        """True if these totals differ from those of the last call."""
        changed, self._counts = counts != self._counts, counts
        return changed

    def open_commands(self, now: float) -> list[bytes]:
        """Frames of commands that have not expired."""
        return [command.frame for command in self.commands if command.expires_at > now]

    def forget_idle_routes(self, now: float) -> None:
        """Drop connections that have said nothing for long; a live relay is noted again with its next message."""
        self.routes = {r: route for r, route in self.routes.items() if now - route.last_at < ROUTE_IDLE_SECONDS}
