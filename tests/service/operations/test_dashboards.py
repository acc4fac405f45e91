"""Dashboards: what Grafana needs of their JSON, and that they ask only for what is served. Data: tests/e2e/test_dashboards.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from alerting import need, tool
from typer.testing import CliRunner

from sentinel.cli.app import app
from sentinel.coordinator.exports.dashboards import dashboards
from sentinel.coordinator.exports.rules import RECORDINGS
from sentinel.coordinator.metric_table import METRICS

ROOT = Path(__file__).parents[3]
SHEETS: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in dashboards().items()}


def panels(sheet: dict[str, Any]) -> list[dict[str, Any]]:
    """Every panel but the rows."""
    return [panel for panel in sheet["panels"] if panel["type"] != "row"]


def expressions(sheet: dict[str, Any]) -> list[str]:
    """Every query, as PromQL without variables."""
    return [t["expr"].replace("$job_id", "r") for panel in panels(sheet) for t in panel["targets"]]


def test_the_package_and_deploy_hold_the_same_files() -> None:
    """What the command exports is what deploy/grafana provisions."""
    provisioned = {path.name: path.read_text() for path in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")}
    assert provisioned == dashboards()
    assert len(provisioned) == 3


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_a_dashboard_is_the_same_wherever_it_is_loaded(name: str) -> None:
    """Its uid is stable and its file's name, its data source is a variable, and it holds no id of one Grafana."""
    sheet = SHEETS[name]
    assert f"{sheet['uid']}.json" == name
    assert sheet.get("id") is None
    variables = {variable["name"]: variable for variable in sheet["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    sources = {json.dumps(p["datasource"]) for p in panels(sheet)} | {
        json.dumps(t["datasource"]) for p in panels(sheet) for t in p["targets"]
    }
    assert {json.loads(source)["uid"] for source in sources} == {"${datasource}"}


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_every_panel_says_what_it_shows(name: str) -> None:
    """A title, a description of a sentence, and a place that no other panel overlaps."""
    places: set[tuple[int, int]] = set()
    for panel in panels(SHEETS[name]):
        assert panel["title"]
        assert panel["description"].endswith((".", "ID."))
        at = panel["gridPos"]
        covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not covered & places, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= covered


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_queries_ask_only_for_what_is_served(name: str) -> None:
    """Every sentinel_ name is a metric of the table or a recording rule."""
    suffixes = {"counter": ("_total",), "info": ("_info",), "gauge": ("",)}
    served = {m.name + s for m in METRICS for s in suffixes.get(m.type, ("_sum", "_count", "_bucket"))}
    served |= {r.record for r in RECORDINGS}
    for expression in expressions(SHEETS[name]):
        assert set(re.findall(r"(?:job_id:)?sentinel_\w+(?::\w+)?", expression)) <= served, expression


def test_promtool_can_read_every_query(tmp_path: Path) -> None:
    """Each query is PromQL: as a recording rule it passes promtool's check."""
    need("promtool")
    rules = [
        {"record": f"x{number}:y", "expr": expression}
        for number, expression in enumerate(e for sheet in SHEETS.values() for e in expressions(sheet))
    ]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}))
    assert f"{len(rules)} rules found" in tool("promtool", "check", "rules", str(tmp_path / "rules.json"))


def test_the_command_writes_them(tmp_path: Path) -> None:
    """``sentinel dashboards export DIR`` writes every file and names it."""
    ran = CliRunner().invoke(app, ["dashboards", "export", str(tmp_path / "new" / "folder")])
    assert ran.exit_code == 0
    assert {Path(line).name for line in ran.stdout.split()} == set(SHEETS)
    assert json.loads((tmp_path / "new" / "folder" / "sentinel-run.json").read_text())["uid"] == "sentinel-run"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """The error says which folder, and exits 1."""
    (tmp_path / "file").touch()
    ran = CliRunner().invoke(app, ["dashboards", "export", str(tmp_path / "file" / "x")])
    assert ran.exit_code == 1
    assert ran.stderr.startswith("sentinel: error: cannot write to ")
