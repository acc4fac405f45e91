"""What the Grafana dashboards show: panels, queries and the words for them, as tables.

Owns content only. ``scripts/dashboards.py`` builds Grafana's JSON of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.models import units

JOB = '{job_id="$job_id"}'


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and its legend. ``instant``: only now matters."""

    expr: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. ``rare``: shows nothing in a run without the trouble it is about (or without timers, or float16)."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = units.Short
    kind: str = "series"
    span: int = 12
    alarm: bool = False  # a stat whose value above zero is red
    log: bool = False
    rare: bool = False


@dataclass(frozen=True, slots=True)
class Sheet:
    """One dashboard: rows of panels, and the variables it is asked with."""

    uid: str
    title: str
    description: str
    variables: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def _stat(title: str, description: str, expr: str, **more: Any) -> Panel:
    return Panel(title, description, (Query(expr, instant=True),), kind="stat", span=4, **more)


def _series(title: str, description: str, *queries: tuple[str, str], **more: Any) -> Panel:
    return Panel(title, description, tuple(Query(expr, legend) for expr, legend in queries), **more)


FLEET = Sheet(
    "sentinel-fleet",
    "Sentinel / Fleet",
    "All runs that report to any coordinator: is something wrong, is everything watched, do the coordinators keep up?",
    (),
    (
        (
            "Now",
            (
                _stat(
                    "Open critical incidents",
                    "Weights are damaged, or would have been.",
                    'sum(sentinel_incidents_open{severity="critical"})',
                    alarm=True,
                ),
                _stat(
                    "Open warnings",
                    "Time is lost, or a script does not do what it says.",
                    'sum(sentinel_incidents_open{severity="warning"})',
                    alarm=True,
                ),
                _stat(
                    "Runs",
                    "Runs that coordinators serve, ended ones for a quarter of an hour.",
                    "count(sentinel_agents_expected)",
                ),
                _stat("Ranks running", "Ranks that report.", 'sum(sentinel_agents{state="running"})'),
                _stat(
                    "Ranks not watched",
                    "Silent or disabled.",
                    'sum(sentinel_agents{state=~"silent|disabled"})',
                    alarm=True,
                ),
                _stat(
                    "Coordinators down",
                    "Targets that do not answer.",
                    'count(up{job=~"sentinel.*"} == 0) or vector(0)',
                    alarm=True,
                ),
            ),
        ),
        (
            "Incidents",
            (
                Panel(
                    "Open incidents",
                    "The ten newest of each run; a row ends when its incident is resolved.",
                    (Query("sentinel_incident_info", instant=True),),
                    kind="table",
                    span=24,
                    rare=True,
                ),
                _series(
                    "Incidents by kind",
                    "New ones within five minutes.",
                    ("sum by (kind) (increase(sentinel_incidents_total[5m])) > 0", "{{kind}}"),
                    rare=True,
                ),
                _series(
                    "Rounds per second",
                    "Gradient synchronisations judged, by run.",
                    ("job_id:sentinel_rounds:rate5m", "{{job_id}}"),
                    unit=units.CountsPerSecond,
                ),
            ),
        ),
        (
            "Coordinators",
            (
                _series(
                    "Reports taken in",
                    "Per second and coordinator.",
                    ("sum by (instance) (rate(sentinel_reports_received_total[5m]))", "{{instance}}"),
                    unit=units.CountsPerSecond,
                ),
                _series(
                    "Share of reports dropped",
                    "Healthy samples that agents and relays let go.",
                    ("job_id:sentinel_reports_dropped:ratio5m", "{{job_id}}"),
                    unit=units.PercentUnit,
                ),
                _series(
                    "Rows not on disk",
                    "What the store still has to commit.",
                    ("sentinel_store_backlog_rows", "{{instance}}"),
                ),
                _series(
                    "Refused and faulty",
                    "Messages and handshakes refused, and the coordinator's own faults, per second.",
                    ("sum by (instance, reason) (rate(sentinel_frames_rejected_total[5m]))", "refused {{reason}}"),
                    ("sum by (instance) (rate(sentinel_connections_denied_total[5m]))", "denied"),
                    ("sum by (instance, reason) (rate(sentinel_coordinator_faults_total[5m]))", "fault {{reason}}"),
                    unit=units.CountsPerSecond,
                ),
                _series(
                    "Time for one event",
                    "What the core takes to judge, on average.",
                    (
                        "sum by (instance) (rate(sentinel_classify_duration_seconds_sum[5m])) / "
                        "sum by (instance) (rate(sentinel_classify_duration_seconds_count[5m]))",
                        "{{instance}}",
                    ),
                    unit=units.Seconds,
                ),
                _series(
                    "Relays connected", "One for each node.", ("sum by (instance) (sentinel_relays)", "{{instance}}")
                ),
            ),
        ),
    ),
)

RUN = Sheet(
    "sentinel-run",
    "Sentinel / Run",
    "One run: does it train, with which numbers, and is every rank watched?",
    ("job_id",),
    (
        (
            "Now",
            (
                _stat("Open incidents", "Not resolved.", f"sum(sentinel_incidents_open{JOB})", alarm=True),
                _stat("Step", "Of the newest round that all ranks closed.", f"max(sentinel_step{JOB})"),
                _stat("Ranks running", "Ranks that report.", 'sum(sentinel_agents{job_id="$job_id",state="running"})'),
                _stat("World size", "Ranks of the run.", f"max(sentinel_agents_expected{JOB})"),
                _stat(
                    "Rounds skipped",
                    "Rounds in which any rank left its step out.",
                    f"sum(sentinel_rounds_skipped_total{JOB})",
                ),
                _stat(
                    "Last report",
                    "How long ago anything came.",
                    f"time() - max(sentinel_last_report_timestamp_seconds{JOB} > 0)",
                    unit=units.Seconds,
                ),
            ),
        ),
        (
            "Training",
            (
                _series("Loss", "Unscaled, over the ranks of the newest round.", (f"sentinel_loss{JOB}", "{{stat}}")),
                _series(
                    "Gradient norm",
                    "L2 norm of what the reductions returned; scaled where there is a GradScaler.",
                    (f"sentinel_gradient_norm{JOB}", "norm"),
                    ('job_id:sentinel_gradient_norm:median30m{job_id="$job_id"}', "median of 30 min"),
                    log=True,
                ),
                _series(
                    "Loss scale",
                    "Halved at each overflow, doubled now and then.",
                    (f"sentinel_loss_scale{JOB}", "scale"),
                    log=True,
                ),
                _series(
                    "float16 headroom",
                    "How many times larger gradients may get before their sum overflows; where float16 is reduced.",
                    (f"sentinel_gradient_headroom_ratio{JOB}", "factor"),
                    log=True,
                    rare=True,
                ),
                _series(
                    "Fastest growing layer",
                    "Its gradient norm over its own mean of some 32 rounds; known after 16.",
                    (f"sentinel_layer_gradient_growth_ratio{JOB}", "growth"),
                    log=True,
                ),
                _series(
                    "Largest gradient",
                    "Largest finite magnitude that a reduction was given.",
                    (f"sentinel_gradient_absmax{JOB}", "absmax"),
                    log=True,
                ),
                _series(
                    "Skipped rounds",
                    "Per minute: by a GradScaler in its search, and all.",
                    (f"60 * sum(rate(sentinel_benign_skips_total{JOB}[5m]))", "search for a scale"),
                    (f"60 * sum(rate(sentinel_rounds_skipped_total{JOB}[5m]))", "all"),
                ),
            ),
        ),
        (
            "Pace and cost",
            (
                _series(
                    "Time of a round",
                    "From the end of one to the end of the next, all ranks.",
                    ('job_id:sentinel_round_duration_seconds:mean5m{job_id="$job_id"}', "mean of 5 min"),
                    unit=units.Seconds,
                ),
                _series(
                    "Share of a round spent on checks",
                    "Told where agents time themselves.",
                    ('job_id:sentinel_check_overhead:ratio5m{job_id="$job_id"}', "checks"),
                    unit=units.PercentUnit,
                ),
            ),
        ),
        (
            "Watch",
            (
                _series(
                    "Ranks by state",
                    "Of the newest attempt.",
                    (f"sum by (state) (sentinel_agents{JOB})", "{{state}}"),
                    span=8,
                ),
                _series(
                    "Reports dropped",
                    "Per second, by reason.",
                    (f"sum by (reason) (rate(sentinel_reports_dropped_total{JOB}[5m]))", "{{reason}}"),
                    unit=units.CountsPerSecond,
                    rare=True,
                    span=8,
                ),
                _series(
                    "Faults swallowed by agents",
                    "Since their start, by reason.",
                    (f"sum by (reason) (sentinel_agent_faults_total{JOB})", "{{reason}}"),
                    rare=True,
                    span=8,
                ),
                Panel(
                    "Open incidents",
                    "The ten newest; show one with: sentinel incidents show ID.",
                    (Query(f"sentinel_incident_info{JOB}", instant=True),),
                    kind="table",
                    span=24,
                    rare=True,
                ),
            ),
        ),
    ),
)

INCIDENT = Sheet(
    "sentinel-incident",
    "Sentinel / Incident",
    "What one run's numbers did around its incidents, and what was kept of them.",
    ("job_id",),
    (
        (
            "What and where",
            (
                Panel(
                    "Open incidents",
                    "Step, ranks and stage of each; the whole story: sentinel incidents show ID.",
                    (Query(f"sentinel_incident_info{JOB}", instant=True),),
                    kind="table",
                    span=24,
                    rare=True,
                ),
                _series(
                    "Incidents opened",
                    "In all, by kind.",
                    (f"sum by (kind) (sentinel_incidents_total{JOB}) > 0", "{{kind}}"),
                    rare=True,
                ),
                _series(
                    "Not resolved",
                    "By kind.",
                    (f"sum by (kind) (sentinel_incidents_open{JOB}) > 0", "{{kind}}"),
                    rare=True,
                ),
            ),
        ),
        (
            "Around it",
            (
                _series(
                    "Loss",
                    "A gap or NaN is a round in which no rank had a finite one.",
                    (f"sentinel_loss{JOB}", "{{stat}}"),
                ),
                _series(
                    "Gradient norm",
                    "NaN where the reduced gradients were nonfinite.",
                    (f"sentinel_gradient_norm{JOB}", "norm"),
                    log=True,
                ),
                _series(
                    "Loss scale",
                    "An ordinary overflow halves it once.",
                    (f"sentinel_loss_scale{JOB}", "scale"),
                    log=True,
                ),
                _series("Skipped rounds", "In all.", (f"sum(sentinel_rounds_skipped_total{JOB})", "skipped")),
            ),
        ),
        (
            "What was kept",
            (
                _stat("Bundles", "Manifests written.", f"sum(sentinel_bundles_committed_total{JOB})"),
                _stat(
                    "Bytes", "Of parts that ranks wrote.", f"sum(sentinel_dump_bytes_total{JOB})", unit=units.BytesIEC
                ),
                _stat(
                    "Failures",
                    "Parts and bundles that are not whole.",
                    f"sum(sentinel_dump_failures_total{JOB})",
                    alarm=True,
                ),
                _series(
                    "Time to write a part",
                    "Slowest tenth, typical one.",
                    (
                        f"histogram_quantile(0.9, sum by (le) (increase(sentinel_dump_duration_seconds_bucket{JOB}[1h])))",
                        "90 %",
                    ),
                    (
                        f"histogram_quantile(0.5, sum by (le) (increase(sentinel_dump_duration_seconds_bucket{JOB}[1h])))",
                        "50 %",
                    ),
                    unit=units.Seconds,
                ),
            ),
        ),
    ),
)

SHEETS = (FLEET, RUN, INCIDENT)
