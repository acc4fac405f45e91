"""Who this agent is within the run."""

from __future__ import annotations

from dataclasses import dataclass

from sentinel_agent.errors import Health


@dataclass(frozen=True, slots=True)
class Identity:
    """Rank, attempt and node as they stand on every report, and the agent's own health."""

    rank: int
    world_size: int
    attempt: int
    node: int
    health: Health
