"""``sentinel rules``: alerting and recording rules for a Prometheus.

Owns the command. The rules themselves are ``coordinator/exports``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from sentinel.cli.output import put

rules_app = typer.Typer(
    no_args_is_help=True, help="Alerting and recording rules for Prometheus.", rich_markup_mode=None
)


class RuleFormat(StrEnum):
    """``--format``: a file for ``rule_files``, or an object for the Prometheus operator."""

    PROMETHEUS = "prometheus"
    OPERATOR = "operator"


@rules_app.callback()
def rules() -> None:
    """Alerting and recording rules for Prometheus."""


@rules_app.command()
def export(
    format_: Annotated[
        RuleFormat, typer.Option("--format", help="prometheus: a rule file; operator: a PrometheusRule object.")
    ] = RuleFormat.PROMETHEUS,
    runbook: Annotated[
        str | None, typer.Option("--runbook", metavar="URL", help="Where your copy of deploy/RUNBOOK.md is published.")
    ] = None,
    standing: Annotated[
        str | None,
        typer.Option("--standing", metavar="JOB", help="Alert also if this scrape job has no coordinator at all."),
    ] = None,
) -> None:
    """Print the rules as YAML, for a file that Prometheus reads."""
    from sentinel.coordinator.exports import alerts as table
    from sentinel.coordinator.exports.rules import RUNBOOK, operator_rules, prometheus_rules

    chosen = table.standing(table.ALERTS, standing) if standing else table.ALERTS
    write = operator_rules if format_ is RuleFormat.OPERATOR else prometheus_rules
    put(write(chosen, runbook or RUNBOOK).rstrip("\n"))
