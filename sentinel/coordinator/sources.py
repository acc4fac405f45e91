"""Where answers over HTTP come from: the database, the loop's present state, and the coordinator's own health.

Owns the shape that ``app.py`` fills in, so that pages know neither threads nor sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from sentinel.coordinator.progress import RoundRow
from sentinel.coordinator.snapshot import RankStatus, RunStatus
from sentinel.incidents.events import Acknowledged, RequestParts
from sentinel.incidents.model import Incident


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The last rounds of one run, oldest first, and the ranks to look at first."""

    world_size: int
    rows: tuple[RoundRow, ...]
    troubled: tuple[RankStatus, ...]


@dataclass(frozen=True, slots=True)
class Sources:
    """Callables for any thread. What asks the loop answers None if it did not answer in time; ages are in seconds."""

    database: Path
    registry: CollectorRegistry
    status: Callable[[bool], tuple[RunStatus, ...] | None]
    progress: Callable[[str, int], RunProgress | None]  # run id, how many rounds; None also if there is no such run
    versions: Callable[[], Mapping[str, str] | None]
    bundle_root: Callable[[str, str], Path]  # run id, bundle id -> the directory whose bundles/ it is in
    loop_age: Callable[[], float]
    store_failing: Callable[[], bool]
    uptime: Callable[[], float]
    scraped: Callable[[], None]
    acknowledge: Callable[[str, Acknowledged], Incident | None]  # run id, the word
    dump_now: Callable[[str], RequestParts | None]  # run id
