"""Prometheus metrics: a custom collector that reads the truth at scrape, and the table of all series it yields.

Owns names, labels and help texts. Counts nothing itself. The number of series does not depend on the number of ranks: rank,
step and parameter belong in the incident, never in a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from sentinel import __version__
from sentinel.coordinator.admission import REJECTION_REASONS
from sentinel.coordinator.faults import Fault
from sentinel.coordinator.snapshot import RunSnapshot, Snapshot
from sentinel.coordinator.totals import DUMP_BUCKETS_SECONDS, DumpFailure
from sentinel.incidents.model import Kind, Severity
from sentinel.incidents.roster import RankCondition
from sentinel.wire.codec import PROTOCOL

MAX_LABEL_CHARACTERS = 128
MAX_REASONS = 24
"""Reasons that peers name are open-ended; beyond this many the rest is summed up as ``other``."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric as documentation shows it. ``name`` is the family's, without the suffix that a scrape shows."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str

    @property
    def exposed_name(self) -> str:
        """The name to query: counters end in ``_total``, infos in ``_info``."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.type, "")


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "sentinel_build", "info", ("version", "protocol"), "Version of this coordinator and of the wire protocol."
    ),
    MetricSpec("sentinel_incidents", "counter", ("job_id", "kind"), "Incidents opened, by kind of fault."),
    MetricSpec("sentinel_incidents_open", "gauge", ("job_id", "severity"), "Incidents not resolved, by severity."),
    MetricSpec("sentinel_agents", "gauge", ("job_id", "state"), "Ranks of the newest attempt, by state."),
    MetricSpec("sentinel_agents_expected", "gauge", ("job_id",), "World size of the run; 0 while unknown."),
    MetricSpec("sentinel_relays", "gauge", ("job_id",), "Connections of node relays heard of lately."),
    MetricSpec("sentinel_rounds_checked", "counter", ("job_id",), "Gradient synchronisations judged over all ranks."),
    MetricSpec(
        "sentinel_benign_skips", "counter", ("job_id",), "Rounds a GradScaler skipped in its search for a scale."
    ),
    MetricSpec("sentinel_reports_received", "counter", ("job_id",), "Reports of ranks and relays taken in."),
    MetricSpec(
        "sentinel_reports_dropped",
        "counter",
        ("job_id", "reason"),
        "Reports that agents and relays dropped, by reason.",
    ),
    MetricSpec(
        "sentinel_agent_faults", "counter", ("job_id", "reason"), "Faults agents and relays swallowed, by reason."
    ),
    MetricSpec("sentinel_last_report_timestamp_seconds", "gauge", ("job_id",), "When the last report came; 0 before."),
    MetricSpec("sentinel_check_duration_seconds", "summary", ("job_id",), "Time a rank spent on checks in one round."),
    MetricSpec("sentinel_classify_duration_seconds", "summary", ("job_id",), "Time the core spent on one event."),
    MetricSpec("sentinel_dump_duration_seconds", "histogram", ("job_id",), "Time a rank took to write its part."),
    MetricSpec("sentinel_dump_bytes", "counter", ("job_id",), "Bytes of parts that ranks wrote."),
    MetricSpec("sentinel_dump_failures", "counter", ("job_id", "reason"), "Parts and bundles that failed, by reason."),
    MetricSpec(
        "sentinel_bundles_committed", "counter", ("job_id",), "Manifests written, partial and repeated ones too."
    ),
    MetricSpec(
        "sentinel_frames_rejected", "counter", ("reason",), "Messages refused before they reached a run, by reason."
    ),
    MetricSpec("sentinel_connections_denied", "counter", (), "Handshakes refused because the key is not allowed."),
    MetricSpec("sentinel_frames_acknowledged", "counter", (), "Critical frames acknowledged to relays."),
    MetricSpec(
        "sentinel_answers_undeliverable", "counter", (), "Answers whose relay was gone; it asks again when back."
    ),
    MetricSpec("sentinel_coordinator_faults", "counter", ("reason",), "Faults of the coordinator itself, by reason."),
    MetricSpec("sentinel_store_backlog_rows", "gauge", (), "Rows that wait to be committed to the database."),
)
_SPECS = {spec.name: spec for spec in METRICS}


def label(value: str) -> str:
    """A peer's string as a label value: no surrogates (they break a whole scrape), nothing unprintable, at most 128 characters."""
    printable = "".join(c if c.isprintable() and not "\ud800" <= c <= "\udfff" else "?" for c in value)
    return printable[:MAX_LABEL_CHARACTERS]


class CoordinatorCollector(Collector):
    """Yields all metrics from one snapshot per scrape."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take

    def collect(self) -> Iterator[Metric]:
        """Every family of ``METRICS``, also while there is no run yet."""
        snapshot = self._take()
        build = InfoMetricFamily("sentinel_build", _SPECS["sentinel_build"].help)
        build.add_metric((), {"version": __version__, "protocol": str(PROTOCOL)})
        yield build
        yield from _run_families(_by_job_id(snapshot.runs))
        yield from _own_families(snapshot)

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not take a snapshot."""
        return ()


def new_registry(take: Callable[[], Snapshot]) -> CollectorRegistry:
    """A registry of this coordinator alone."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(CoordinatorCollector(take))
    return registry


def _by_job_id(runs: Iterable[RunSnapshot]) -> dict[str, RunSnapshot]:
    """Runs by label value. Two ids that look the same once cleaned would make a scrape invalid: the later one gets a number."""
    named: dict[str, RunSnapshot] = {}
    for run in runs:
        name, number = label(run.run_id), 2
        while name in named:
            name, number = f"{label(run.run_id)[:120]}~{number}", number + 1
        named[name] = run
    return named


def _run_families(runs: Mapping[str, RunSnapshot]) -> Iterator[Metric]:
    kinds, severities = [k.value for k in Kind], [s.value for s in Severity]
    states, failures = [c.value for c in RankCondition], [f.value for f in DumpFailure]
    yield _labelled("sentinel_incidents", {j: _all(kinds, r.incidents) for j, r in runs.items()})
    yield _labelled("sentinel_incidents_open", {j: _all(severities, r.open_incidents) for j, r in runs.items()})
    yield _labelled("sentinel_agents", {j: _all(states, r.agents) for j, r in runs.items()})
    yield _single("sentinel_agents_expected", {j: r.world_size for j, r in runs.items()})
    yield _single("sentinel_relays", {j: r.relays for j, r in runs.items()})
    yield _single("sentinel_rounds_checked", {j: r.rounds_checked for j, r in runs.items()})
    yield _single("sentinel_benign_skips", {j: r.benign_skips for j, r in runs.items()})
    yield _single("sentinel_reports_received", {j: r.reports for j, r in runs.items()})
    yield _labelled("sentinel_reports_dropped", {j: _bounded(r.drops) for j, r in runs.items()})
    yield _labelled("sentinel_agent_faults", {j: _bounded(r.faults) for j, r in runs.items()})
    yield _single("sentinel_last_report_timestamp_seconds", {j: r.last_report_at for j, r in runs.items()})
    yield _summary("sentinel_check_duration_seconds", {j: (r.rank_rounds, r.check_seconds) for j, r in runs.items()})
    yield _summary(
        "sentinel_classify_duration_seconds", {j: (r.classify_calls, r.classify_seconds) for j, r in runs.items()}
    )
    yield _dump_durations(runs)
    yield _single("sentinel_dump_bytes", {j: r.dump_bytes for j, r in runs.items()})
    yield _labelled("sentinel_dump_failures", {j: _all(failures, r.dump_failures) for j, r in runs.items()})
    yield _single("sentinel_bundles_committed", {j: r.bundles for j, r in runs.items()})


def _own_families(snapshot: Snapshot) -> Iterator[Metric]:
    yield _own("sentinel_frames_rejected", _all(REJECTION_REASONS, snapshot.rejected))
    yield _own("sentinel_connections_denied", {"": snapshot.denied_connections})
    yield _own("sentinel_frames_acknowledged", {"": snapshot.acknowledged})
    yield _own("sentinel_answers_undeliverable", {"": snapshot.undeliverable})
    yield _own("sentinel_coordinator_faults", _all([f.value for f in Fault], snapshot.faults))
    yield _own("sentinel_store_backlog_rows", {"": snapshot.backlog_rows})


def _all(names: Iterable[str], counts: Mapping[str, int]) -> dict[str, float]:
    """Every name of a closed set, with 0 for what never happened: a counter that is born at 1 is invisible to ``increase()``."""
    return {name: counts.get(name, 0) for name in names}


def _bounded(counts: Mapping[str, int]) -> dict[str, float]:
    """The largest reasons by themselves, the rest as ``other``."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown: dict[str, float] = {}
    for number, (reason, count) in enumerate(ordered):
        name = label(reason) if number < MAX_REASONS else "other"
        shown[name] = shown.get(name, 0) + count
    return shown


def _family(name: str) -> Any:
    spec = _SPECS[name]
    family = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "summary": SummaryMetricFamily}[spec.type]
    return family(name, spec.help, labels=spec.labels)


def _labelled(name: str, values: Mapping[str, Mapping[str, float]]) -> Metric:
    family: Metric = _family(name)
    for job_id, by_label in values.items():
        for second, value in by_label.items():
            family.add_metric((job_id, second), value)  # type: ignore[attr-defined]
    return family


def _single(name: str, values: Mapping[str, float]) -> Metric:
    family: Metric = _family(name)
    for job_id, value in values.items():
        family.add_metric((job_id,), value)  # type: ignore[attr-defined]
    return family


def _own(name: str, values: Mapping[str, float]) -> Metric:
    family: Metric = _family(name)
    for first, value in values.items():
        family.add_metric((first,) if _SPECS[name].labels else (), value)  # type: ignore[attr-defined]
    return family


def _summary(name: str, values: Mapping[str, tuple[int, float]]) -> Metric:
    family: SummaryMetricFamily = _family(name)
    for job_id, (count, total) in values.items():
        family.add_metric((job_id,), count_value=count, sum_value=total)
    return family


def _dump_durations(runs: Mapping[str, RunSnapshot]) -> Metric:
    name = "sentinel_dump_duration_seconds"
    family = HistogramMetricFamily(name, _SPECS[name].help, labels=_SPECS[name].labels)
    bounds = [*(str(b) for b in DUMP_BUCKETS_SECONDS), "+Inf"]
    for job_id, run in runs.items():
        cumulative, buckets = 0, []
        for bound, count in zip(bounds, run.dump_seconds_buckets, strict=True):
            cumulative += count
            buckets.append((bound, float(cumulative)))
        family.add_metric((job_id,), buckets, sum_value=run.dump_seconds_sum)
    return family
