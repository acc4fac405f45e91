"""An agent in the process of the test, whose reports are kept instead of sent, and processes that a test starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sentinel.wire import names
from sentinel.wire.messages import ClosedBy, Evidence, Phase, RoundClosed
from sentinel_agent.agent import Agent
from sentinel_agent.config import AgentConfig

SITE = Path(__file__).parents[1] / "agents" / "sentinel_agent" / "inject" / "site"
PROCESS_SECONDS = 100.0


@dataclass
class Watched:
    """One agent and every report it made, in order."""

    agent: Agent
    reports: list[Any] = field(default_factory=list)
    expects_faults: bool = False  # set by tests that plant some; in all others there must be none

    @staticmethod
    def over(agent: Agent) -> Watched:
        """Put a list in place of the agent's socket."""
        watched = Watched(agent)
        agent.channel.send = watched.reports.append  # type: ignore[method-assign]
        return watched

    @property
    def rounds(self) -> list[RoundClosed]:
        """The rounds closed so far."""
        return [r for r in self.reports if isinstance(r, RoundClosed)]

    @property
    def steps(self) -> list[int]:
        """Step number of each closed round."""
        return [r.step for r in self.rounds]

    @property
    def closed_by(self) -> list[ClosedBy]:
        """What closed each round."""
        return [r.closed_by for r in self.rounds]

    def evidence(self, *phases: Phase) -> list[Evidence]:
        """Evidence so far, of ``phases`` only if any are given."""
        return [r for r in self.reports if isinstance(r, Evidence) and (not phases or r.phase in phases)]

    @property
    def faults(self) -> dict[str, int]:
        """Faults of the agent's own, by place and type."""
        return dict(self.agent.health.faults)


def watched_rank(run_dir: Path, **options: Any) -> Watched:
    """In a process of its own: join the group that ``run_ranks`` prepared, and start an agent that keeps its reports."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(run_dir / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    config = AgentConfig(**{"run_dir": run_dir, "dump_level": "stats", "goodbye_seconds": 0.0, **options})
    watched = Watched.over(Agent(config, rank, world_size))
    watched.agent.start()
    return watched


def run_ranks(script: str, run_dir: Path, world_size: int = 2) -> list[Any]:
    """Run ``script`` in so many processes; ``sys.argv[1]`` is ``run_dir``. Gives the JSON that each printed last, by rank."""
    path = run_dir / "ranks.py"
    path.write_text(script)
    ranks = [
        subprocess.Popen(
            [sys.executable, path, run_dir],
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parent),
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        ended = [rank.communicate(timeout=PROCESS_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, ended, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in ended]


def injected(**more: str) -> dict[str, str]:
    """The environment of a process that the launcher starts, with ``more`` variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "TORCHELASTIC", "PYTHONPATH"))}
    return {**kept, "PYTHONPATH": str(SITE), names.ENV_AGENT: "1", "OMP_NUM_THREADS": "1", **more}


def run_python(
    arguments: Sequence[str | Path], environment: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
    )
