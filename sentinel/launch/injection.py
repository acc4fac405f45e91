"""The environment that puts the agent into every training process without a change to the user's code.

Owns which variables a worker gets and where the agent's ``sitecustomize`` lies. Reads and writes no environment itself
(``options.py`` does), and never imports the agent.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path

from sentinel.launch.options import LaunchOptions
from sentinel.wire import names

AGENT_PACKAGE = "sentinel_agent"
SITE_DIRECTORY = Path("inject", "site")


class AgentMissing(RuntimeError):
    """The agent package is not installed next to the service, or lacks its injection directory."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker's agent must know: which run it is part of, where parts go and where reports go."""

    run_id: str
    run_dir: Path
    node: int
    relay_address: str
    command_key: str  # hex


def worker_environment(context: WorkerContext, options: LaunchOptions) -> dict[str, str]:
    """Variables to add for the workers. PYTHONPATH as the user has it stays behind ours. Raises AgentMissing."""
    site = str(site_directory())
    return {
        "PYTHONPATH": f"{site}{os.pathsep}{options.python_path}" if options.python_path else site,
        names.ENV_AGENT: "1",
        names.ENV_RUN_ID: context.run_id,
        names.ENV_RUN_DIR: str(context.run_dir),
        names.ENV_NODE: str(context.node),
        names.ENV_RELAY: context.relay_address,
        names.ENV_COMMAND_KEY: context.command_key,
        names.ENV_AGENT_OPTIONS: json.dumps(agent_options(options)),
    }


def agent_options(options: LaunchOptions) -> dict[str, object]:
    """Only what the user asked for: whatever is not here keeps the agent's own default."""
    asked: dict[str, object] = {
        "dump_level": options.dump_level,
        "redact": options.redact,
        "max_bundles": options.max_bundles,
        "window_rounds": options.window,
        "guard": options.guard,
        "max_skips": options.max_skips and options.max_skips[0],
        "max_skips_total": options.max_skips and options.max_skips[1],
    }
    return {**options.agent_options, **{name: value for name, value in asked.items() if value is not None}}


def site_directory() -> Path:
    """Directory that holds the agent's ``sitecustomize.py``. Raises AgentMissing."""
    spec = importlib.util.find_spec(AGENT_PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        site = Path(place) / SITE_DIRECTORY
        if (site / "sitecustomize.py").is_file():
            return site
    raise AgentMissing(
        f"package {AGENT_PACKAGE} has no {SITE_DIRECTORY}/sitecustomize.py" if places else f"no package {AGENT_PACKAGE}"
    )
