"""Prometheus metrics: a custom collector that reads the truth at scrape.

Owns how values become series, and the cleaning of what peers name. Counts nothing itself; names and helps are in
``metric_table.py``. The number of series does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

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
from sentinel.coordinator.metric_table import SPECS
from sentinel.coordinator.snapshot import RunSnapshot, Snapshot
from sentinel.coordinator.totals import DUMP_BUCKETS_SECONDS, DumpFailure
from sentinel.incidents.model import Kind, Severity
from sentinel.incidents.roster import RankCondition
from sentinel.wire.codec import PROTOCOL
from sentinel.wire.messages import Guarded

MAX_LABEL_CHARACTERS = 128
ENDED_SHOWN_SECONDS = 900.0
MAX_REASONS = 24
"""Reasons that peers name are open-ended; beyond this many the rest is summed up as ``other``."""


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
        build = InfoMetricFamily("sentinel_build", SPECS["sentinel_build"].help)
        build.add_metric((), {"version": __version__, "protocol": str(PROTOCOL)})
        yield build
        yield from _run_families(_by_job_id(run for run in snapshot.runs if _is_shown(run, snapshot.taken_at)))
        yield from _own_families(snapshot)

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not take a snapshot."""
        return ()


def new_registry(take: Callable[[], Snapshot]) -> CollectorRegistry:
    """A registry of this coordinator alone."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(CoordinatorCollector(take))
    return registry


def _is_shown(run: RunSnapshot, now: float) -> bool:
    """Long enough after its end for every alert to have been seen; then a standing coordinator sheds the run's series."""
    return run.ended_at is None or now - run.ended_at < ENDED_SHOWN_SECONDS


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
    faults = [(kind, severity) for kind in kinds for severity in severities]
    yield _by_fault("sentinel_incidents", {j: _all(faults, r.incidents) for j, r in runs.items()})
    yield _by_fault("sentinel_incidents_open", {j: _all(faults, r.open_incidents) for j, r in runs.items()})
    yield _open_incidents(runs)
    yield _labelled("sentinel_agents", {j: _all(states, r.agents) for j, r in runs.items()})
    yield _single("sentinel_agents_expected", {j: r.world_size for j, r in runs.items()})
    yield _single("sentinel_relays", {j: r.relays for j, r in runs.items()})
    yield _single("sentinel_rounds_checked", {j: r.rounds_checked for j, r in runs.items()})
    yield _single("sentinel_benign_skips", {j: r.benign_skips for j, r in runs.items()})
    decisions = [g.value for g in Guarded if g is not Guarded.NO]
    yield _labelled("sentinel_guard_rounds", {j: _all(decisions, r.guarded) for j, r in runs.items()})
    yield from _progress_families(runs)
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


def _progress_families(runs: Mapping[str, RunSnapshot]) -> Iterator[Metric]:
    yield _single("sentinel_rounds_skipped", {j: r.rounds_skipped for j, r in runs.items()})
    yield _summary("sentinel_round_duration_seconds", {j: (r.rounds_timed, r.round_seconds) for j, r in runs.items()})
    newest = {j: r.newest for j, r in runs.items() if r.newest is not None}
    yield _single("sentinel_step", {j: n.step for j, n in newest.items()})
    yield _labelled("sentinel_loss", {j: n.loss for j, n in newest.items()})
    yield _single("sentinel_loss_scale", _known({j: n.loss_scale for j, n in newest.items()}))
    yield _single("sentinel_gradient_norm", _known({j: n.gradient_norm for j, n in newest.items()}))
    yield _single("sentinel_gradient_absmax", _known({j: n.gradient_absmax for j, n in newest.items()}))
    yield _single("sentinel_gradient_headroom_ratio", _known({j: n.headroom for j, n in newest.items()}))
    yield _single("sentinel_layer_gradient_growth_ratio", _known({j: n.layer_growth for j, n in newest.items()}))


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    """Only what was told: a run without a GradScaler has no loss scale, not one of 0."""
    return {name: value for name, value in values.items() if value is not None}


def _open_incidents(runs: Mapping[str, RunSnapshot]) -> Metric:
    """Which ranks, which step: for the text of an alert, in a handful of series that end with the incident."""
    spec = SPECS["sentinel_incident"]
    family = InfoMetricFamily(spec.name, spec.help, labels=("job_id",))
    for job_id, run in runs.items():
        for incident in run.newest_open:
            family.add_metric((job_id,), {name: label(value) for name, value in incident.labels.items()})
    return family


def _own_families(snapshot: Snapshot) -> Iterator[Metric]:
    yield _own("sentinel_frames_rejected", _all(REJECTION_REASONS, snapshot.rejected))
    yield _own("sentinel_connections_denied", {"": snapshot.denied_connections})
    yield _own("sentinel_frames_acknowledged", {"": snapshot.acknowledged})
    yield _own("sentinel_answers_undeliverable", {"": snapshot.undeliverable})
    yield _own("sentinel_coordinator_faults", _all([f.value for f in Fault], snapshot.faults))
    yield _own("sentinel_store_backlog_rows", {"": snapshot.backlog_rows})


Name = TypeVar("Name", str, tuple[str, str])


def _all(names: Iterable[Name], counts: Mapping[Name, int]) -> dict[Name, float]:
    """Every name of a closed set, with 0 for what never happened: a counter that is born at 1 is invisible to ``increase()``."""
    return {name: counts.get(name, 0) for name in names}


def _bounded(counts: Mapping[str, int]) -> dict[str, float]:
    """The largest reasons by themselves, the rest as ``other``, which is there from the start so that a share of 0 is one."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown: dict[str, float] = {"other": 0}
    for number, (reason, count) in enumerate(ordered):
        name = label(reason) if number < MAX_REASONS else "other"
        shown[name] = shown.get(name, 0) + count
    return shown


def _family(name: str) -> Any:
    spec = SPECS[name]
    family = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "summary": SummaryMetricFamily}[spec.type]
    return family(name, spec.help, labels=spec.labels)


def _by_fault(name: str, values: Mapping[str, Mapping[tuple[str, str], float]]) -> Metric:
    family: Metric = _family(name)
    for job_id, by_labels in values.items():
        for labels, value in by_labels.items():
            family.add_metric((job_id, *labels), value)  # type: ignore[attr-defined]
    return family


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
        family.add_metric((first,) if SPECS[name].labels else (), value)  # type: ignore[attr-defined]
    return family


def _summary(name: str, values: Mapping[str, tuple[int, float]]) -> Metric:
    family: SummaryMetricFamily = _family(name)
    for job_id, (count, total) in values.items():
        family.add_metric((job_id,), count_value=count, sum_value=total)
    return family


def _dump_durations(runs: Mapping[str, RunSnapshot]) -> Metric:
    name = "sentinel_dump_duration_seconds"
    family = HistogramMetricFamily(name, SPECS[name].help, labels=SPECS[name].labels)
    bounds = [*(str(b) for b in DUMP_BUCKETS_SECONDS), "+Inf"]
    for job_id, run in runs.items():
        cumulative, buckets = 0, []
        for bound, count in zip(bounds, run.dump_seconds_buckets, strict=True):
            cumulative += count
            buckets.append((bound, float(cumulative)))
        family.add_metric((job_id,), buckets, sum_value=run.dump_seconds_sum)
    return family
