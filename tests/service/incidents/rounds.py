"""Rounds of a made-up job, told tersely: who saw what, in which order, and how each rank closed the round.

Owns the making of reports for the tests of the core (``from service.incidents.rounds import Round, World``). What the core makes of
them is the tests' business.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import msgspec

from sentinel.incidents.classify import classify
from sentinel.incidents.comparisons import compare
from sentinel.incidents.events import Command, Event, Expect, Received, SaveIncident, Tick
from sentinel.incidents.finding import Finding
from sentinel.incidents.history import History
from sentinel.incidents.model import Incident, Verdict
from sentinel.incidents.scaler import ScalerHistory
from sentinel.incidents.tracker import Tracker
from sentinel.incidents.view import View
from sentinel.incidents.window import RoundWindow
from sentinel.wire.messages import (
    Check,
    ClosedBy,
    Collective,
    Evidence,
    Goodbye,
    GroupSync,
    Hello,
    NodeEnded,
    PartWritten,
    Phase,
    Report,
    Role,
    RoundClosed,
)

T0 = 1_796_000_000.0
FINITE = Check(numel=100, nan=0, inf=0, absmax=1.0)
NAN = Check(numel=100, nan=3, inf=0, absmax=1.0)
INF = Check(numel=100, nan=0, inf=2, absmax=1.0)

BUCKET = Collective("0", (), 0, "allreduce_", "SUM", "float32", Role.GRADIENT, FINITE)
HALF_BUCKET = msgspec.structs.replace(BUCKET, dtype="float16", narrowed=True)
SHARD = msgspec.structs.replace(BUCKET, op="_reduce_scatter_base_")
ACTIVATION = msgspec.structs.replace(BUCKET, role=Role.ACTIVATION)
DERIVED = msgspec.structs.replace(BUCKET, role=Role.DERIVED, index=1)
SCALAR = msgspec.structs.replace(BUCKET, role=Role.SCALAR)
GATHERED = msgspec.structs.replace(ACTIVATION, group="0 gather", op="allgather_", reduce_op="GATHER")


def collective(like: Collective = BUCKET, **changes: Any) -> Collective:
    """A collective like ``like`` but for ``changes``."""
    return msgspec.structs.replace(like, **changes)


class Round:
    """One round of ``size`` ranks. Every method adds to the story and returns the round."""

    def __init__(self, size: int, number: int = 0, *, step: int | None = None, attempt: int = 0) -> None:
        self.size, self.number, self.attempt = size, number, attempt
        self.step = number if step is None else step
        self._evidence: dict[int, list[Evidence]] = {}
        self._closing: dict[str, Any] = {"closed_by": ClosedBy.OPTIMIZER, "loss": 1.0}
        self._own_closing: dict[int, dict[str, Any]] = {}
        self._unclosed: set[int] = set()
        self._lost: set[tuple[int, int]] = set()

    # --- what ranks saw ------------------------------------------------------------------------------------------------

    def saw(self, phase: Phase, *ranks: int, found: Check = NAN, **fields: Any) -> Self:
        """Each of ``ranks`` (all, if none is named) latched evidence of ``phase``, after what it had latched before."""
        names = fields.pop("parameters", ())
        for rank in ranks or range(self.size):
            seen = self._evidence.setdefault(rank, [])
            seen.append(
                Evidence(
                    attempt=self.attempt,
                    rank=rank,
                    round=self.number,
                    step=self.step,
                    order=len(seen),
                    phase=phase,
                    at=T0 + self.number,
                    check=found,
                    parameters=tuple(names),
                    **{"parameters_total": len(names), **fields},
                )
            )
        return self

    def loss(self, *ranks: int, value: float = math.nan) -> Self:
        """The loss that backward was called on was nonfinite."""
        return self.saw(Phase.LOSS, *ranks, value=value)

    def raw(self, *ranks: int, found: Check = NAN, parameters: Iterable[str] = ("head.weight",)) -> Self:
        """Autograd's gradients were nonfinite, seen before any collective."""
        return self.saw(Phase.RAW, *ranks, found=found, parameters=tuple(parameters))

    def wire(
        self,
        *ranks: int,
        of: Collective = BUCKET,
        found: Check = NAN,
        raw: Check | None = NAN,
        parameters: Iterable[str] = ("head.weight",),
    ) -> Self:
        """What the ranks gave the collective was nonfinite; ``raw`` is what was found of the gradients behind it."""
        given = collective(of, wire=found, raw=raw)
        return self.saw(Phase.WIRE, *ranks, found=found, collective=given, parameters=tuple(parameters))

    def reduced(
        self, *ranks: int, of: Collective = BUCKET, found: Check = NAN, absmax: float | Mapping[int, float] = 1.0
    ) -> Self:
        """The collective returned nonfinite values; ``absmax`` is the largest finite magnitude each rank had given it."""
        for rank in ranks or of.ranks or range(self.size):
            own = absmax if isinstance(absmax, float | int) else absmax.get(rank, 1.0)
            # A rank whose input was nonfinite says so in every evidence about the collective.
            wire = next((e.collective.wire for e in self._about(rank, of) if e.collective), FINITE)
            given = collective(of, wire=msgspec.structs.replace(wire, absmax=own), reduced=found)
            self.saw(Phase.REDUCED, rank, found=found, collective=given)
        return self

    def nan_gradient(self, *ranks: int, of: Collective = BUCKET, found: Check = NAN) -> Self:
        """The plain story: nonfinite gradients of ``ranks`` go into the collective, and come out on every rank of it."""
        return self.wire(*ranks, of=of, found=found, raw=found).reduced(of=of, found=found)

    def _about(self, rank: int, of: Collective) -> Iterator[Evidence]:
        for e in self._evidence.get(rank, ()):
            one = e.collective
            if e.phase is Phase.WIRE and one and (one.group, one.index) == (of.group, of.index):
                yield e

    # --- how it closed -------------------------------------------------------------------------------------------------

    def closed(self, by: ClosedBy = ClosedBy.OPTIMIZER, *ranks: int, **fields: Any) -> Self:
        """Fields of the closing record, of every rank or of the named ones."""
        for rank in ranks:
            self.record(rank, closed_by=by, **fields)
        if not ranks:
            self._closing.update(closed_by=by, **fields)
        return self

    def record(self, rank: int, **fields: Any) -> Self:
        """More fields of one rank's closing record."""
        self._own_closing.setdefault(rank, {}).update(fields)
        return self

    def scaler_skip(self, scale: float = 1024.0) -> Self:
        """The GradScaler left the optimizer's step out, on every rank."""
        return self.closed(ClosedBy.SCALER_SKIP, skipped=True, loss_scale=scale)

    def unclosed(self, *ranks: int) -> Self:
        """These ranks never closed the round, or the record was lost."""
        self._unclosed.update(ranks)
        return self

    def lost(self, rank: int, *orders: int) -> Self:
        """This evidence never arrived, though the closing record counts it."""
        self._lost.update((rank, order) for order in orders)
        return self

    # --- what comes of it ----------------------------------------------------------------------------------------------

    def evidence(self, *ranks: int) -> list[Evidence]:
        """Evidence that arrives, rank by rank."""
        wanted = ranks or tuple(sorted(self._evidence))
        seen = [e for rank in wanted for e in self._evidence.get(rank, ())]
        return [e for e in seen if (e.rank, e.order) not in self._lost]

    def closings(self, *ranks: int) -> list[RoundClosed]:
        """Closing records that arrive, rank by rank."""
        wanted = ranks or tuple(range(self.size))
        return [self._closed(rank) for rank in wanted if rank not in self._unclosed]

    def _closed(self, rank: int) -> RoundClosed:
        fields = {"step": self.step, **self._closing, **self._own_closing.get(rank, {})}
        return RoundClosed(
            attempt=self.attempt,
            rank=rank,
            round=self.number,
            at=T0 + self.number,
            evidence=len(self._evidence.get(rank, ())),
            checks=2,
            **fields,
        )

    def joined(self) -> list[Evidence | RoundClosed]:
        """What a window joins: the evidence as it was latched, then the closings."""
        return [*self.evidence(), *self.closings()]

    def reports(self) -> list[Report]:
        """Everything that arrives, in the order it was sent."""
        return [*self.joined()]

    def window(self) -> RoundWindow:
        """The round joined."""
        window = RoundWindow(self.attempt, self.number, opened_at=T0)
        for report in self.joined():
            window.add(report, T0)
        return window

    def view(self, scaler: ScalerHistory | None = None) -> View:
        """The round as the rules see it; whoever's reports are not all there is missing."""
        window, world = self.window(), tuple(range(self.size))
        return View(window, world, window.incomplete(world), scaler or ScalerHistory())


def sync(size: int = 3, *, group: str = "0", ranks: tuple[int, ...] = (), **fields: Any) -> GroupSync:
    """What a healthy rank says of its group."""
    return GroupSync(group, ranks, size, **{"collectives": 2, "identity": 7, "fingerprint": 11, "norm": 1.0, **fields})


def synced(size: int, changes: Mapping[int, Mapping[str, Any]], *, number: int = 4, **every: Any) -> Round:
    """A round in which all ranks reduced together, and some said something else than the rest."""
    told = Round(size, number)
    for rank in range(size):
        told.record(rank, sync=(sync(size, **{**every, **changes.get(rank, {})}),), backwards=1, gradient_absmax=1.0)
    return told


def found(told: Round, history: History | None = None) -> list[Finding]:
    """What comparing the ranks of this round finds."""
    return compare(told.window(), history or History())


def only(findings: list[Finding]) -> Finding:
    """The only finding."""
    (one,) = findings
    return one


def verdict_of(told: Round, scaler: ScalerHistory | None = None) -> Verdict:
    """The verdict of a round that must have one."""
    outcome = classify(told.view(scaler))
    assert isinstance(outcome, Verdict), outcome
    return outcome


@dataclasses.dataclass
class World:
    """A run of ``size`` ranks and the tracker it reports to; the clock moves only when told to."""

    size: int
    tracker: Tracker = dataclasses.field(default_factory=lambda: Tracker("run"))
    now: float = T0
    attempt: int = 0
    next_round: int = 0
    node_of: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.feed(Expect(self.size))

    def feed(self, *events: Event | Report) -> list[Command]:
        """Hand events (or bare reports) to the tracker; returns its commands."""
        commands: list[Command] = []
        for event in events:
            wrapped = event if isinstance(event, Event) else Received(event)
            commands += self.tracker.handle(wrapped, self.now)
        return commands

    def round(self, number: int | None = None) -> Round:
        """The next round (or round ``number``), not told to the tracker yet."""
        chosen = self.next_round if number is None else number
        self.next_round = chosen + 1
        return Round(self.size, chosen, attempt=self.attempt)

    def healthy(self, rounds: int = 1, *, scale: float | None = None) -> list[Command]:
        """That many rounds in which nobody saw anything."""
        return self.tell(*(self.round().closed(loss_scale=scale) for _ in range(rounds)))

    def tell(self, *rounds: Round) -> list[Command]:
        """Feed all reports of these rounds in the order they were sent."""
        return [command for one in rounds for command in self.feed(*one.reports())]

    def hello(self, *ranks: int) -> list[Command]:
        """The agents of ``ranks`` (all, if none is named) are up."""
        return self.feed(*(self._hello(rank) for rank in ranks or range(self.size)))

    def _hello(self, rank: int) -> Hello:
        node = self.node_of.get(rank, 0)
        return Hello(self.attempt, rank, rank, node, self.size, 100 + rank, "host", "0", "2", self.now)

    def wait(self, seconds: float) -> list[Command]:
        """Time passes with no report."""
        self.now += seconds
        return self.feed(Tick())

    def restart(self) -> None:
        """A new attempt begins at round 0; nobody has said hello yet."""
        self.attempt, self.next_round = self.attempt + 1, 0

    def goodbye(self, rank: int, last_round: int) -> Goodbye:
        """This rank's process is ending in order."""
        return Goodbye(self.attempt, rank, last_round, clean=True)

    def node_ended(self, node: int) -> NodeEnded:
        """The processes of this node are gone."""
        return NodeEnded(self.attempt, node, exit_code=1)

    def part(self, rank: int, number: int, error: str = "") -> PartWritten:
        """This rank's part of round ``number`` is written."""
        place = f"/run/bundles/rank-{rank:05d}"
        return PartWritten(self.attempt, rank, number, number, 0, place, 10, 0.1, error)

    @property
    def incidents(self) -> list[Incident]:
        """Incidents so far, in the order they opened."""
        return list(self.tracker.incidents.values())

    @property
    def incident(self) -> Incident:
        """The only incident."""
        (only,) = self.incidents
        return only


def saved(commands: Iterable[Command]) -> list[SaveIncident]:
    """The commands that store an incident."""
    return [c for c in commands if isinstance(c, SaveIncident)]
