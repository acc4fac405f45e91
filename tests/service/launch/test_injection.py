"""The environment that carries the agent into the workers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from sentinel.launch import injection
from sentinel.launch.injection import AgentMissing, WorkerContext, agent_options, site_directory, worker_environment
from sentinel.launch.options import parse

CONTEXT = WorkerContext("run-1", Path("/runs/1"), 3, "ipc:///tmp/x/relay", "ab" * 32)


@pytest.fixture
def agent_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with an injection directory, in the agent's place."""
    package = tmp_path / "stand_in_agent"
    (package / "inject" / "site").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the launcher must not import the agent')")
    (package / "inject" / "site" / "sitecustomize.py").touch()
    monkeypatch.setattr(injection, "AGENT_PACKAGE", "stand_in_agent")
    monkeypatch.syspath_prepend(str(tmp_path))
    return package


def test_the_site_directory_is_found_without_importing_the_agent(agent_package: Path) -> None:
    """The launcher knows where sitecustomize lies and never runs a line of the agent."""
    assert site_directory() == agent_package / "inject" / "site"
    assert "stand_in_agent" not in sys.modules


def test_our_directory_comes_before_the_users_path(agent_package: Path) -> None:
    """PYTHONPATH as the user has it is kept, behind the injection directory."""
    site = str(agent_package / "inject" / "site")
    kept = worker_environment(CONTEXT, parse(["x.py"], {"PYTHONPATH": f"/mine{os.pathsep}/yours"}))
    assert kept["PYTHONPATH"].split(os.pathsep) == [site, "/mine", "/yours"]
    # An empty entry would put the working directory on the path.
    assert worker_environment(CONTEXT, parse(["x.py"], {}))["PYTHONPATH"] == site


def test_a_worker_learns_its_run(agent_package: Path) -> None:
    """Run, directory, node, relay and command key travel under the names both sides share."""
    variables = worker_environment(CONTEXT, parse(["x.py"], {}))
    assert variables["SENTINEL_AGENT"] == "1"
    assert variables["SENTINEL_RUN_ID"] == "run-1"
    assert variables["SENTINEL_RUN_DIR"] == "/runs/1"
    assert variables["SENTINEL_NODE"] == "3"
    assert variables["SENTINEL_RELAY"] == "ipc:///tmp/x/relay"
    assert variables["SENTINEL_COMMAND_KEY"] == "ab" * 32


GUARDED = ["--sentinel-guard", "skip", "--sentinel-max-skips", "3", "x.py"]


def test_only_what_was_asked_for_overrides_the_agents_defaults(agent_package: Path) -> None:
    """Options the user did not give are not in the JSON, so that the agent's own defaults stand."""
    assert json.loads(worker_environment(CONTEXT, parse(["x.py"], {}))["SENTINEL_AGENT_OPTIONS"]) == {}
    asked = ["--sentinel-dump-level", "stats", "--sentinel-max-bundles", "2", "--sentinel-window", "4", "x.py"]
    assert agent_options(parse(asked, {})) == {"dump_level": "stats", "max_bundles": 2, "window_rounds": 4}
    assert agent_options(parse(["--sentinel-redact", "mine.private:redact", "x.py"], {})) == {
        "redact": "mine.private:redact"
    }
    guarded = agent_options(parse(GUARDED, {}))
    assert guarded == {"guard": "skip", "max_skips": 3, "max_skips_total": 30}


def test_the_agent_knows_every_option_the_launcher_can_send() -> None:
    """Names of the options are fields of the agent's settings: launcher and agent are one version."""
    config = pytest.importorskip("sentinel_agent.config")
    asked = ["--sentinel-dump-level", "stats", "--sentinel-max-bundles", "2", "--sentinel-window", "4", *GUARDED]
    assert set(agent_options(parse(asked, {}))) <= set(config.AgentConfig.__dataclass_fields__)


def test_a_missing_agent_is_said_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No agent package, or one without its injection directory, is an error that names it."""
    monkeypatch.setattr(injection, "AGENT_PACKAGE", "no_such_agent_package")
    with pytest.raises(AgentMissing, match="no_such_agent_package"):
        site_directory()
    (tmp_path / "no_such_agent_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(AgentMissing, match=r"sitecustomize\.py"):
        site_directory()
