"""Grafana dashboards, built from the tables of ``dashboard_sheets.py``.

Owns the form of panels. ``dashboards()`` gives the JSON texts; writing them is ``scripts/deploy.py``. Needs grafana-foundation-sdk
(extra [dev]); who uses Sentinel takes the finished files (``sentinel dashboards export``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dashboard_sheets import SHEETS, Panel, Sheet
from grafana_foundation_sdk.builders import dashboard as dash
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders.common import ScaleDistributionConfig
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "sentinel"


def dashboards() -> dict[str, str]:
    """JSON text of every dashboard, by uid."""
    return {sheet.uid: JSONEncoder(sort_keys=True, indent=1).encode(_build(sheet).build()) + "\n" for sheet in SHEETS}


def _build(sheet: Sheet) -> dash.Dashboard:
    built = (
        dash.Dashboard(sheet.title)
        .uid(sheet.uid)
        .description(sheet.description)
        .tags([TAG])
        .readonly()
        .timezone("browser")
        .refresh("10s")
        .time("now-1h", "now")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(dash.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(
            dash.DashboardLink("Sentinel")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
    )
    for name in sheet.variables:
        built = built.with_variable(
            dash.QueryVariable(name)
            .label("Run")
            .datasource(SOURCE)
            .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .query(f"label_values(sentinel_agents_expected, {name})")
            .sort(model.VariableSort.ALPHABETICAL_DESC)
        )
    for title, panels in sheet.rows:
        built = built.with_row(dash.Row(title))
        for panel in panels:
            built = built.with_panel(_KINDS[panel.kind](panel))
    return built


def _fill(built: Any, panel: Panel) -> Any:
    built = built.title(panel.title).description(panel.description).datasource(SOURCE).span(panel.span).unit(panel.unit)
    built = built.height(4 if panel.kind == "stat" else 8)
    for letter, query in zip("ABCDEF", panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter).datasource(SOURCE)
        if query.instant:
            target = target.instant()
        if panel.kind == "table":
            target = target.format(PromQueryFormat.TABLE)
        built = built.with_target(target)
    return built


def _series_panel(panel: Panel) -> timeseries.Panel:
    built: timeseries.Panel = _fill(timeseries.Panel(), panel)
    if panel.log:
        built = built.scale_distribution(ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(2))
    return built.line_width(2).fill_opacity(8).show_points(common.VisibilityMode.NEVER)


def _stat_panel(panel: Panel) -> stat.Panel:
    built: stat.Panel = _fill(stat.Panel(), panel)
    steps = [model.Threshold(value=None, color="green" if panel.alarm else "text")]
    if panel.alarm:
        steps.append(model.Threshold(value=1, color="red"))
    return built.thresholds(dash.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)).color_mode(
        common.BigValueColorMode.VALUE
    )


def _table_panel(panel: Panel) -> table.Panel:
    hidden = dict.fromkeys(("Time", "Value", "__name__", "job", "instance"), True)
    order = ("severity", "kind", "job_id", "step", "ranks", "attribution", "stage", "incident_id")
    organise = {"excludeByName": hidden, "indexByName": {name: place for place, name in enumerate(order)}}
    built: table.Panel = _fill(table.Panel(), panel)
    return built.transformations([model.DataTransformerConfig(id_val="organize", options=organise)])


_KINDS: dict[str, Callable[[Panel], Any]] = {"series": _series_panel, "stat": _stat_panel, "table": _table_panel}
"""What builds a panel of each kind."""
