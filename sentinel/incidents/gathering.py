"""Which ranks' parts make a bundle, and when it is time to commit what came.

Owns the wait for parts. Pure: the parts themselves are on disk, and ``sentinel/bundle/commit.py`` writes the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sentinel.incidents.events import Command, CommitBundle, RequestParts
from sentinel.incidents.model import Incident
from sentinel.wire.messages import PartWritten
from sentinel.wire.names import BUNDLES, bundle_id

PARTS_SECONDS = 20.0
"""A bundle whose parts have not all come by then is committed as partial."""

PLANNED_SECONDS = 120.0
"""The same for a bundle of a round that was still to come when it was asked for."""


@dataclass(slots=True)
class _Bundle:
    attempt: int
    round: int
    step: int
    deadline: float
    wanted: set[int] = field(default_factory=set)
    parts: dict[int, PartWritten] = field(default_factory=dict)
    incidents: list[str] = field(default_factory=list)
    decided: bool = False  # the round was judged: it is known whose parts are wanted
    changed: bool = False  # a part came since the last commit


class Gathering:
    """Bundles of a run by (attempt, round)."""

    def __init__(self) -> None:
        self._bundles: dict[tuple[int, int], _Bundle] = {}

    def part(self, report: PartWritten, now: float) -> None:
        """A rank's part is on disk, or could not be."""
        bundle = self._bundle(report.attempt, report.round, report.step, now)
        if report.rank not in bundle.parts or bundle.parts[report.rank].error:
            bundle.parts[report.rank] = report
            bundle.step = report.step if not bundle.incidents else bundle.step
            bundle.changed = True

    def want(self, incident: Incident, ranks: tuple[int, ...], now: float) -> RequestParts | None:
        """An incident opened: its bundle wants a part of each of ``ranks``. Returns the request for those not here yet."""
        bundle = self._bundle(incident.attempt, incident.last_round, incident.step, now)
        bundle.decided, bundle.changed = True, True
        bundle.incidents.append(incident.id)
        bundle.wanted |= set(ranks)
        absent = tuple(sorted(bundle.wanted - set(bundle.parts)))
        return RequestParts(incident.attempt, incident.last_round, absent) if absent else None

    def plan(self, attempt: int, round_: int, ranks: tuple[int, ...], now: float) -> RequestParts:
        """Somebody asked for a dump of a round that is yet to come."""
        bundle = self._bundle(attempt, round_, round_, now)
        bundle.deadline = now + PLANNED_SECONDS
        bundle.decided = True
        bundle.wanted |= set(ranks)
        return RequestParts(attempt, round_, tuple(sorted(bundle.wanted - set(bundle.parts))))

    def unwanted(self, attempt: int, round_: int, now: float) -> None:
        """The round raised no incident; parts that ranks wrote all the same are committed as they are."""
        if (attempt, round_) in self._bundles:
            self._bundle(attempt, round_, round_, now).decided = True

    def waits_for(self, rank: int) -> bool:
        """True if a bundle still wants this rank's part."""
        return any(rank in b.wanted and rank not in b.parts for b in self._bundles.values())

    def commit_ready(self, now: float, world_size: int, ended: bool) -> list[Command]:
        """Commit every bundle that is whole, past its deadline, or at the end of the run."""
        return [
            self._commit(bundle, world_size)
            for bundle in self._bundles.values()
            if bundle.changed and bundle.parts and self._is_due(bundle, now, ended)
        ]

    def committed(self, commands: list[Command]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """(path relative to the run directory, incident ids) of each bundle that ``commands`` commit."""
        for command in commands:
            if isinstance(command, CommitBundle):
                yield f"{BUNDLES}/{command.bundle}", command.incidents

    def _is_due(self, bundle: _Bundle, now: float, ended: bool) -> bool:
        return ended or now >= bundle.deadline or (bundle.decided and bundle.wanted <= set(bundle.parts))

    def _bundle(self, attempt: int, round_: int, step: int, now: float) -> _Bundle:
        return self._bundles.setdefault((attempt, round_), _Bundle(attempt, round_, step, now + PARTS_SECONDS))

    def _commit(self, bundle: _Bundle, world_size: int) -> CommitBundle:
        bundle.changed = False
        whole = {rank for rank, part in bundle.parts.items() if not part.error}
        return CommitBundle(
            bundle=bundle_id(bundle.attempt, bundle.round),
            attempt=bundle.attempt,
            round=bundle.round,
            step=bundle.step,
            world_size=world_size,
            present=tuple((p.rank, p.node, p.directory, p.error) for _, p in sorted(bundle.parts.items())),
            missing=tuple(sorted(bundle.wanted - whole)),
            incidents=tuple(bundle.incidents),
        )
