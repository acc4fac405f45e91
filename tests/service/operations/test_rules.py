"""Rules and routes: written as the code says, accepted and understood by Prometheus' own tools, each alert with its runbook."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from alerting import need, tool
from loading import load_script

from sentinel.coordinator.exports.alerts import ALERTS, standing
from sentinel.coordinator.exports.block_yaml import to_yaml
from sentinel.coordinator.exports.rules import RECORDINGS, prometheus_rules, runbook_anchor
from sentinel.coordinator.metric_table import METRICS

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "sentinel.rules.yml"
deploy = load_script("deploy")


@pytest.mark.parametrize("path", sorted(deploy.files()), ids=lambda p: p.name)
def test_generated_files_are_current(path: Path) -> None:
    """Every generated deployment file is what scripts/deploy.py would write now."""
    assert path.read_text() == deploy.files()[path], "run scripts/deploy.py"


def test_promtool_accepts_rules_and_configuration() -> None:
    """Rules and scrape examples pass promtool's own check."""
    assert f"{len(RECORDINGS) + len(ALERTS)} rules found" in tool("promtool", "check", "rules", str(RULES))
    tool("promtool", "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))


def test_rules_do_what_their_unit_tests_say() -> None:
    """promtool's unit tests of the rules pass, and no alert is without one."""
    tests = DEPLOY / "prometheus" / "sentinel.rules.test.yml"
    assert "SUCCESS" in tool("promtool", "test", "rules", str(tests))
    text = tests.read_text()
    for alert in ALERTS:
        named = re.findall(rf"alertname: {alert.name}(?=\n\s+exp_alerts:\n)", text)
        assert named, f"{alert.name} is never expected to fire"


def test_a_standing_coordinator_that_vanished_is_down_too(tmp_path: Path) -> None:
    """With --standing, a scrape job without any target fires CoordinatorDown; without it, only a target that does not answer."""
    (tmp_path / "rules.yml").write_text(prometheus_rules(standing(ALERTS, "sentinel-coordinator")))
    expected = {"job": "sentinel-coordinator", "severity": "critical"}
    case = {
        "interval": "15s",
        "input_series": [{"series": "up{job='node'}", "values": "1x40"}],
        "promql_expr_test": [
            {
                "expr": "count by (job, severity) (ALERTS{alertname='SentinelCoordinatorDown',alertstate='firing'})",
                "eval_time": "5m",
                "exp_samples": [
                    {
                        "labels": json.dumps(expected).replace('": ', "=").replace('{"', "{").replace(', "', ","),
                        "value": 1,
                    }
                ],
            }
        ],
    }
    test = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [case]}
    (tmp_path / "test.yml").write_text(json.dumps(test))
    tool("promtool", "test", "rules", "test.yml", cwd=tmp_path)


def test_alerts_ask_only_for_metrics_that_are_served() -> None:
    """Every sentinel_ name in a rule is a metric of the table (with its suffix) or a recording of ours."""
    suffixes = {"counter": ("_total",), "info": ("_info",), "summary": ("_sum", "_count"), "gauge": ("",)}
    served = {m.name + s for m in METRICS for s in suffixes.get(m.type, ("_sum", "_count", "_bucket"))}
    recorded = {r.record for r in RECORDINGS}
    for expr in [r.expr for r in RECORDINGS] + [a.expr for a in ALERTS]:
        for name in re.findall(r"(?:job_id:)?sentinel_\w+(?::\w+)?", expr):
            assert name in served | recorded, name


def test_alerts_keep_what_inhibition_needs() -> None:
    """Every expression that sums keeps job and instance, which is how Alertmanager ties an alert to its coordinator."""
    for alert in ALERTS:
        for kept in re.findall(r"\b(?:by|on) \(([^)]*)\)", alert.expr):
            assert {"job", "instance"} <= {word.strip() for word in kept.split(",")}, alert.name


def test_every_alert_has_its_section() -> None:
    """runbook_url of each alert leads to a heading of the runbook, and the runbook knows no other alerts."""
    headings = re.findall(r"^## (Sentinel\w+)$", (DEPLOY / "RUNBOOK.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(alert.name for alert in ALERTS)
    for alert in ALERTS:
        assert f"RUNBOOK.md#{runbook_anchor(alert.name)}" in RULES.read_text()
        assert alert.severity in ("critical", "warning", "info")
        assert alert.description.endswith((".", "{{ end }}"))


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ("alertname=SentinelIncidentCritical severity=critical", "training-pager"),
        ("alertname=SentinelCoordinatorDown severity=critical", "training-pager"),
        ("alertname=SentinelIncidentWarning severity=warning", "training-chat"),
        ("alertname=SentinelDumpFailed severity=warning", "training-chat"),
    ],
)
def test_alerts_reach_the_right_people(labels: str, receiver: str) -> None:
    """Critical alerts go to the pager, warnings to the chat."""
    config = f"--config.file={DEPLOY / 'alertmanager' / 'alertmanager.yml'}"
    assert tool("amtool", "config", "routes", "test", config, *labels.split()).split()[0] == receiver


def test_amtool_accepts_the_routes() -> None:
    """The Alertmanager example passes its own check."""
    assert "SUCCESS" in tool("amtool", "check-config", str(DEPLOY / "alertmanager" / "alertmanager.yml"))


def test_yaml_is_what_was_meant(tmp_path: Path) -> None:
    """Strings that look like something else, many lines, braces and quotes come back as they were, by a reader that is not ours."""
    need("amtool")
    assert to_yaml(
        {"a": "true", "b": "1", "c": "x: y", "d": 'say "hi"', "e": "two\nlines", "f": [], "g": [{"h": "i", "j": 2}]}
    ) == ('a: "true"\nb: "1"\nc: "x: y"\nd: "say \\"hi\\""\ne: |-\n  two\n  lines\nf: []\ng:\n  - h: i\n    j: 2\n')
    receivers = [{"name": "true", "webhook_configs": [{"url": "http://h/x#y"}]}]
    (tmp_path / "am.yml").write_text(to_yaml({"route": {"receiver": "true"}, "receivers": receivers}))
    assert shutil.which("amtool")
    assert "SUCCESS" in tool("amtool", "check-config", str(tmp_path / "am.yml"))
