"""Prometheus rules as files: recording rules, alerts, and both as the operator's PrometheusRule.

Owns the recording rules and the form of the files. What is alerted on is ``alerts.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sentinel.coordinator.exports.alerts import ALERTS, Alert
from sentinel.coordinator.exports.block_yaml import to_yaml

RUNBOOK = "https://example.com/sentinel/RUNBOOK.md"
"""Where the runbook is published; a site names its own place (``sentinel rules export --runbook URL``)."""
HEADER = "# Written by `sentinel rules export`; change sentinel/coordinator/exports, not this file.\n"


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording rule, named level:metric:operation."""

    record: str
    expr: str


_BY = "by (job, instance, job_id)"
RECORDINGS: tuple[Recording, ...] = (
    Recording("job_id:sentinel_rounds:rate5m", f"sum {_BY} (rate(sentinel_rounds_checked_total[5m]))"),
    Recording(
        "job_id:sentinel_round_duration_seconds:mean5m",
        f"sum {_BY} (rate(sentinel_round_duration_seconds_sum[5m]))\n"
        f"/\nsum {_BY} (rate(sentinel_round_duration_seconds_count[5m]))",
    ),
    Recording(
        "job_id:sentinel_agents_reporting:ratio",
        f'sum {_BY} (sentinel_agents{{state=~"running|ended"}})\n/\nsum {_BY} (sentinel_agents_expected > 0)',
    ),
    Recording(
        "job_id:sentinel_reports_dropped:ratio5m",
        f"sum {_BY} (rate(sentinel_reports_dropped_total[5m]))\n/\n(\n"
        f"  sum {_BY} (rate(sentinel_reports_received_total[5m]))\n"
        f"  +\n  sum {_BY} (rate(sentinel_reports_dropped_total[5m]))\n)",
    ),
    Recording(
        "job_id:sentinel_check_overhead:ratio5m",
        f"sum {_BY} (rate(sentinel_check_duration_seconds_sum[5m]))\n"
        f"/\nsum {_BY} (rate(sentinel_check_duration_seconds_count[5m]))\n"
        "/\njob_id:sentinel_round_duration_seconds:mean5m",
    ),
    Recording("job_id:sentinel_gradient_norm:median30m", "quantile_over_time(0.5, sentinel_gradient_norm[30m])"),
)


def rule_groups(alerts: Sequence[Alert] = ALERTS, runbook: str = RUNBOOK) -> dict[str, Any]:
    """The content of a rule file. ``runbook`` is where deploy/RUNBOOK.md is published."""
    return {
        "groups": [
            {"name": "sentinel.recordings", "rules": [{"record": r.record, "expr": r.expr} for r in RECORDINGS]},
            {"name": "sentinel.alerts", "rules": [_alerting(alert, runbook) for alert in alerts]},
        ]
    }


def prometheus_rules(alerts: Sequence[Alert] = ALERTS, runbook: str = RUNBOOK) -> str:
    """A rule file for Prometheus' ``rule_files``."""
    return HEADER + to_yaml(rule_groups(alerts, runbook))


def operator_rules(alerts: Sequence[Alert] = ALERTS, runbook: str = RUNBOOK) -> str:
    """The same as a PrometheusRule of the Prometheus operator."""
    return HEADER + to_yaml(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "sentinel", "labels": {"app.kubernetes.io/name": "sentinel"}},
            "spec": rule_groups(alerts, runbook),
        }
    )


def runbook_anchor(alert: str) -> str:
    """The anchor of an alert's section, as Markdown renderers make it of a heading."""
    return alert.lower()


def _alerting(alert: Alert, runbook: str) -> dict[str, Any]:
    times = {"for": alert.wait, "keep_firing_for": alert.keep}
    return {
        "alert": alert.name,
        "expr": alert.expr,
        **{name: duration for name, duration in times.items() if duration},
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{runbook}#{runbook_anchor(alert.name)}",
        },
    }
