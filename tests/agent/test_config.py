"""The agent's settings come from the environment that the launcher made, and from nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sentinel.wire import names
from sentinel_agent.config import AgentConfig, switched_on

VARIABLES = [value for name, value in vars(names).items() if name.startswith("ENV_")]


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "TORCHELASTIC_RESTART_COUNT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_an_empty_environment_gives_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a launcher there is no relay, the run directory is here, and nothing slow is on."""
    monkeypatch.chdir(tmp_path)
    config = AgentConfig.from_environment()
    assert config.relay is None
    assert config.run_dir == tmp_path
    assert (config.attempt, config.local_rank, config.node) == (0, 0, 0)
    assert not config.timers
    assert config.check_delay == 0.0
    assert config.fail_at == ""
    assert not switched_on()


def test_the_launcher_s_variables_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run, directory, node, relay, key, attempt and options arrive as they were set."""
    monkeypatch.setenv(names.ENV_AGENT, "1")
    monkeypatch.setenv(names.ENV_RUN_ID, "digits-1")
    monkeypatch.setenv(names.ENV_RUN_DIR, "runs/digits-1")
    monkeypatch.setenv(names.ENV_NODE, "4")
    monkeypatch.setenv(names.ENV_RELAY, "ipc://somewhere")
    monkeypatch.setenv(names.ENV_COMMAND_KEY, "ab" * 32)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv(names.ENV_AGENT_OPTIONS, json.dumps({"dump_level": "stats", "window_rounds": 5}))
    config = AgentConfig.from_environment()
    assert switched_on()
    assert (config.run_id, config.node, config.relay) == ("digits-1", 4, "ipc://somewhere")
    assert config.run_dir == Path.cwd() / "runs" / "digits-1"
    assert config.command_key == b"\xab" * 32
    assert (config.attempt, config.local_rank) == (2, 7)
    assert (config.dump_level, config.window_rounds) == ("stats", 5)


def test_an_unknown_option_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher of another version is noticed, not half understood."""
    monkeypatch.setenv(names.ENV_AGENT_OPTIONS, '{"windows": 3}')
    with pytest.raises(TypeError, match="windows"):
        AgentConfig.from_environment()


@pytest.mark.parametrize("value", ["", "0", "true"])
def test_only_one_value_switches_the_agent_on(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Anything but 1 leaves the process alone."""
    monkeypatch.setenv(names.ENV_AGENT, value)
    assert not switched_on()
