"""The truth at one moment, as the loop's thread sees it: what metrics, pages and the API are made from.

Owns the shapes and their taking. Immutable, so that any thread may read one.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from sentinel.coordinator.progress import RoundRow
from sentinel.coordinator.run import Run
from sentinel.coordinator.totals import DUMP_BUCKETS_SECONDS
from sentinel.incidents.model import Incident, State
from sentinel.incidents.roster import RankCondition, RankState

MAX_OPEN_SHOWN = 10
MAX_RANKS_SHOWN = 8
MAX_TROUBLED = 24
ROUNDS_BEHIND = 2
_TROUBLED = frozenset({RankCondition.SILENT, RankCondition.DISABLED})


@dataclass(frozen=True, slots=True)
class OpenIncident:
    """An incident as an alert's text needs it."""

    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NewestRound:
    """The newest round that all ranks closed. ``loss`` by statistic; None: not told by any rank."""

    step: int
    loss: Mapping[str, float]
    loss_scale: float | None
    gradient_norm: float | None
    gradient_absmax: float | None
    headroom: float | None
    layer_growth: float | None


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """One run's numbers. Histogram counts are per bucket, not cumulative."""

    run_id: str
    ended: bool
    world_size: int
    agents: Mapping[str, int]
    incidents: Mapping[tuple[str, str], int]  # by kind and severity
    open_incidents: Mapping[tuple[str, str], int]
    newest_open: tuple[OpenIncident, ...]
    reports: int
    rounds_checked: int
    benign_skips: int
    guarded: Mapping[str, int]  # by what the guard did
    rank_rounds: int
    check_seconds: float
    last_report_at: float
    drops: Mapping[str, int]
    faults: Mapping[str, int]
    dump_parts: int
    dump_bytes: int
    dump_seconds_sum: float
    dump_seconds_buckets: tuple[int, ...]
    dump_failures: Mapping[str, int]
    bundles: int
    classify_seconds: float
    classify_calls: int
    relays: int
    rounds_skipped: int
    rounds_timed: int
    round_seconds: float
    newest: NewestRound | None
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All runs, and the coordinator's own counters."""

    taken_at: float
    runs: tuple[RunSnapshot, ...]
    rejected: Mapping[str, int]
    faults: Mapping[str, int]
    denied_connections: int
    acknowledged: int
    undeliverable: int
    backlog_rows: int


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class RankStatus(_Record):
    """One rank of the newest attempt. ``last_seen`` in unix seconds."""

    rank: int
    state: str
    node: int
    step: int
    last_round: int
    last_seen: float


class RunStatus(_Record):
    """One run as ``/api/v1/status`` tells it."""

    run_id: str
    ended: bool
    world_size: int
    last_round: int
    rounds_checked: int
    reports: int
    benign_skips: int
    open_incidents: int
    states: dict[str, int]
    drops: dict[str, int]
    ranks: tuple[RankStatus, ...]


def run_snapshot(run: Run) -> RunSnapshot:
    """Numbers of one run."""
    tracker, totals = run.tracker, run.totals
    incidents = tuple(tracker.incidents.values())
    return RunSnapshot(
        run_id=run.run_id,
        ended=run.ended,
        world_size=tracker.world_size,
        agents=Counter(rank.state.value for rank in tracker.ranks.values()),
        incidents=_by_kind_and_severity(incidents),
        open_incidents=_by_kind_and_severity(_open(incidents)),
        newest_open=tuple(_open_incident(incident) for incident in _open(incidents)[-MAX_OPEN_SHOWN:]),
        reports=tracker.counts.reports,
        rounds_checked=tracker.counts.rounds_checked,
        benign_skips=tracker.counts.benign_skips,
        guarded=dict(tracker.counts.guarded),
        rank_rounds=totals.rank_rounds,
        check_seconds=totals.check_seconds,
        last_report_at=totals.last_report_at,
        drops=tracker.counts.drops(),
        faults=tracker.counts.faults(),
        dump_parts=totals.dump_parts,
        dump_bytes=totals.dump_bytes,
        dump_seconds_sum=totals.dump_seconds.sum,
        dump_seconds_buckets=tuple(totals.dump_seconds.by_bound) or (0,) * (len(DUMP_BUCKETS_SECONDS) + 1),
        dump_failures={reason.value: count for reason, count in totals.dump_failures.items()},
        bundles=totals.bundles,
        classify_seconds=totals.classify_seconds,
        classify_calls=totals.classify_calls,
        relays=len(run.routes),
        rounds_skipped=run.progress.rounds_skipped,
        rounds_timed=run.progress.rounds_timed,
        round_seconds=run.progress.round_seconds,
        newest=_newest(run.progress.newest),
        ended_at=run.ended_at if run.ended else None,
    )


def run_status(run: Run, *, with_ranks: bool) -> RunStatus:
    """Status of one run; ranks in ascending order, left out on request (a large run has many)."""
    tracker = run.tracker
    ranks = [tracker.ranks[rank] for rank in sorted(tracker.ranks)]
    return RunStatus(
        run_id=run.run_id,
        ended=run.ended,
        world_size=tracker.world_size,
        last_round=max((rank.last_round for rank in ranks), default=-1),
        rounds_checked=tracker.counts.rounds_checked,
        reports=tracker.counts.reports,
        benign_skips=tracker.counts.benign_skips,
        open_incidents=len(_open(tracker.incidents.values())),
        states=dict(sorted(Counter(rank.state.value for rank in ranks).items())),
        drops=dict(sorted(tracker.counts.drops().items())),
        ranks=tuple(_rank_status(rank) for rank in (ranks if with_ranks else ())),
    )


def _rank_status(rank: RankState) -> RankStatus:
    return RankStatus(
        rank=rank.rank,
        state=rank.state.value,
        node=rank.node,
        step=rank.step,
        last_round=rank.last_round,
        last_seen=rank.last_seen,
    )


def troubled_ranks(run: Run) -> tuple[RankStatus, ...]:
    """The ranks to look at first, at most ``MAX_TROUBLED``: silent or disabled ones, then those that fell behind."""
    ranks = run.tracker.ranks.values()
    newest = max((rank.last_round for rank in ranks), default=-1)
    troubled = (r for r in ranks if r.state in _TROUBLED or (not run.ended and r.last_round < newest - ROUNDS_BEHIND))
    chosen = heapq.nsmallest(MAX_TROUBLED, troubled, key=lambda r: (r.state not in _TROUBLED, r.last_round, r.rank))
    return tuple(_rank_status(rank) for rank in chosen)


def run_version(run: Run) -> str:
    """A token that changes with everything a page could show of a run."""
    incidents = run.tracker.incidents.values()
    seen = f"{len(incidents)}.{len(_open(incidents))}.{sum(incident.occurrences for incident in incidents)}"
    return f"{run.progress.version}.{seen}.{run.totals.bundles}.{run.ended}"


def empty_snapshot() -> Snapshot:
    """What is known before the loop has answered once."""
    return Snapshot(time.time(), (), {}, {}, 0, 0, 0, 0)


def _by_kind_and_severity(incidents: Iterable[Incident]) -> Mapping[tuple[str, str], int]:
    return Counter((incident.kind.value, incident.severity.value) for incident in incidents)


def _open_incident(incident: Incident) -> OpenIncident:
    ranks = ",".join(str(rank) for rank in incident.suspect_ranks[:MAX_RANKS_SHOWN])
    more = len(incident.suspect_ranks) - MAX_RANKS_SHOWN
    return OpenIncident(
        {
            "severity": incident.severity.value,
            "kind": incident.kind.value,
            "incident_id": incident.id,
            "stage": incident.stage.value,
            "attribution": incident.attribution.value,
            "step": str(incident.step),
            "ranks": f"{ranks},+{more}" if more > 0 else ranks or "none",
        }
    )


def _newest(row: RoundRow | None) -> NewestRound | None:
    if row is None:
        return None
    loss = {} if row.loss_mean is None else {"mean": row.loss_mean}
    if row.losses:
        loss |= {"min": row.loss_min, "max": row.loss_max}
    return NewestRound(
        row.step, loss, row.loss_scale, row.gradient_norm, row.gradient_absmax, row.headroom, row.layer_growth
    )


def _open(incidents: Iterable[Incident]) -> list[Incident]:
    return [incident for incident in incidents if incident.state is not State.RESOLVED]
