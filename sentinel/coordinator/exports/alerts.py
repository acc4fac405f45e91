"""The alerts: when somebody is told, of what, and how urgently.

Owns expressions, waiting times and words. How they become files is ``rules.py``; each alert has its section in deploy/RUNBOOK.md.

Every expression keeps ``job`` and ``instance``, so that Alertmanager can hold back what only follows from a coordinator that is
down. Counters are asked twice: ``increase()`` cannot see a counter whose first sample is already 1, which is what a scrape finds of
a run that went wrong at once.
"""

from __future__ import annotations

from dataclasses import dataclass

COORDINATORS = 'job=~"sentinel.*"'
"""The scrape jobs whose targets are coordinators, as the examples in deploy/prometheus name them."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule. ``wait`` and ``keep`` are Prometheus durations: how long it must hold, and how long it outlasts."""

    name: str
    expr: str
    severity: str
    summary: str
    description: str
    wait: str = "0m"
    keep: str = ""


def _grew(counter: str, window: str, by: str) -> str:
    """True where ``counter`` grew within ``window``, also if it was born above 0."""
    return (
        f"sum by (job, instance, {by}) (increase({counter}[{window}])) > 0\n"
        f"or\nsum by (job, instance, {by}) ({counter} unless {counter} offset {window}) > 0"
    )


def _incident(severity: str) -> str:
    selector = f'{{severity="{severity}"}}'
    return f"sum by (job, instance, job_id, kind) (sentinel_incidents_open{selector}) > 0\nor\n" + _grew(
        f"sentinel_incidents_total{selector}", "5m", "job_id, kind"
    )


_WHERE = (
    "{{ range printf `sentinel_incident_info{job_id=%q,kind=%q}` $labels.job_id $labels.kind | query }}"
    "Step {{ .Labels.step }}, ranks {{ .Labels.ranks }} ({{ .Labels.attribution }}, {{ .Labels.stage }}): "
    "sentinel incidents show {{ .Labels.incident_id }}. {{ end }}"
)

ALERTS: tuple[Alert, ...] = (
    Alert(
        "SentinelIncidentCritical",
        _incident("critical"),
        "critical",
        "{{ $labels.job_id }}: {{ $labels.kind }}",
        f"Weights of this run are damaged, or would have been. {_WHERE}",
        keep="15m",
    ),
    Alert(
        "SentinelIncidentWarning",
        _incident("warning"),
        "warning",
        "{{ $labels.job_id }}: {{ $labels.kind }}",
        f"This run does not do what its script means. {_WHERE}",
        keep="15m",
    ),
    Alert(
        "SentinelCoordinatorDown",
        f"up{{{COORDINATORS}}} == 0",
        "critical",
        "The coordinator at {{ $labels.instance }} does not answer",
        "Nobody judges what its runs report. Relays keep critical reports on disk and deliver them once it is back.",
        wait="1m",
    ),
    Alert(
        "SentinelAgentsMissing",
        "sentinel_agents_expected - on (job, instance, job_id)\n"
        '  sum by (job, instance, job_id) (sentinel_agents{state=~"running|ended"}) > 0\n'
        'and on (job, instance, job_id)\n  sentinel_agents{state="running"} > 0',
        "warning",
        "{{ $labels.job_id }}: {{ $value }} rank(s) are not watched",
        "These ranks are silent, switched their agent off, or never reported. A fault of theirs would be seen late or not at all.",
        wait="2m",
    ),
    Alert(
        "SentinelReportsStopped",
        "time() - (sentinel_last_report_timestamp_seconds > 0) > 300\n"
        'and on (job, instance, job_id)\n  sentinel_agents{state=~"running|silent"} > 0',
        "warning",
        "{{ $labels.job_id }}: no report for {{ $value | humanizeDuration }}",
        "Training hangs (a collective that some rank never joined), or the way to the coordinator is cut.",
    ),
    Alert(
        "SentinelReportsDropped",
        "job_id:sentinel_reports_dropped:ratio5m > 0.01",
        "warning",
        "{{ $labels.job_id }}: {{ $value | humanizePercentage }} of reports are dropped",
        "Healthy rounds are missing from curves and comparisons. Critical reports are kept on disk and are not among them.",
        wait="5m",
    ),
    Alert(
        "SentinelLossScaleCollapsing",
        "sentinel_loss_scale < 1\nor\nsentinel_loss_scale / max_over_time(sentinel_loss_scale[30m]) < 1 / 4096",
        "warning",
        "{{ $labels.job_id }}: the loss scale fell to {{ $value | humanize }}",
        "The GradScaler halves its scale at each overflow and finds no end: gradients are nonfinite at any scale, or nearly.",
        wait="2m",
    ),
    Alert(
        "SentinelGradientHeadroomLow",
        "max_over_time(sentinel_gradient_headroom_ratio[10m]) < 2",
        "warning",
        "{{ $labels.job_id }}: float16 sums of gradients are a factor {{ $value | humanize }} below overflow",
        "For ten minutes the ranks' largest gradients could have added up to more than half of float16's maximum.",
        wait="5m",
    ),
    Alert(
        "SentinelGradientNormSpiking",
        "sentinel_gradient_norm > 10 * job_id:sentinel_gradient_norm:median30m\n"
        "and\ncount_over_time(sentinel_gradient_norm[30m]) >= 20",
        "warning",
        "{{ $labels.job_id }}: gradient norm {{ $value | humanize }}",
        "It has been above ten times its median of the last half hour for a minute.",
        wait="1m",
    ),
    Alert(
        "SentinelLayerGradientGrowing",
        "max_over_time(sentinel_layer_gradient_growth_ratio[5m]) > 100",
        "warning",
        "{{ $labels.job_id }}: gradients of one layer are {{ $value | humanize }} times their usual size",
        "Its norm is more than a hundred times its own mean of the last rounds. The rounds of the API (/api/v1/rounds) name it.",
    ),
    Alert(
        "SentinelDumpFailed",
        _grew("sentinel_dump_failures_total", "15m", "job_id, reason"),
        "warning",
        "{{ $labels.job_id }}: a bundle is not whole ({{ $labels.reason }})",
        "A part or the manifest of a bundle could not be written; replaying that round may not be possible.",
        keep="15m",
    ),
    Alert(
        "SentinelCheckOverheadHigh",
        "job_id:sentinel_check_overhead:ratio5m > 0.05",
        "warning",
        "{{ $labels.job_id }}: checks take {{ $value | humanizePercentage }} of a round",
        "Told only by runs whose agents time themselves (SENTINEL_AGENT_OPTIONS='{\"timers\": true}').",
        wait="10m",
    ),
    Alert(
        "SentinelCoordinatorFaults",
        _grew("sentinel_coordinator_faults_total", "5m", "reason"),
        "warning",
        "The coordinator at {{ $labels.instance }} swallowed a fault of its own ({{ $labels.reason }})",
        "One message, answer or row was lost to it; the log of the coordinator says which.",
        keep="15m",
    ),
    Alert(
        "SentinelStoreBehind",
        "sentinel_store_backlog_rows > 10000",
        "warning",
        "The coordinator at {{ $labels.instance }} has {{ $value }} rows that are not on disk",
        "The disk is slower than the reports. From 50000 rows on relays are told to keep theirs.",
        wait="2m",
    ),
    Alert(
        "SentinelPeersRefused",
        "sum by (job, instance) (rate(sentinel_frames_rejected_total[5m])) > 0\nor\n"
        "sum by (job, instance) (rate(sentinel_connections_denied_total[5m])) > 0",
        "warning",
        "The coordinator at {{ $labels.instance }} keeps refusing a peer",
        "A launcher of another version or with another key, or somebody who should not be there.",
        wait="5m",
    ),
)


def standing(alerts: tuple[Alert, ...], job: str) -> tuple[Alert, ...]:
    """``alerts`` for a site whose coordinator always runs: no target at all under ``job`` is as bad as one that is down."""
    absent = f'absent(up{{job="{job}"}})'
    return tuple(
        Alert(a.name, f"{a.expr}\nor\n{absent}", a.severity, a.summary, a.description, a.wait, a.keep)
        if a.name == "SentinelCoordinatorDown"
        else a
        for a in alerts
    )
