"""What one rank gave to each reduction of the round, on disk between the replays of the ranks.

Owns the file: safetensors, names ``<reduction>.<tensor>``.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from sentinel_agent.replay.world import Contributions
from sentinel_agent.tensorfile import write_tensors


def write_contributions(path: Path, contributions: Contributions) -> None:
    """Write them to a new file. Raises OSError."""
    named = [(f"{i}.{j}", t) for i, tensors in enumerate(contributions) for j, t in enumerate(tensors)]
    write_tensors(path, named)


def read_contributions(path: Path) -> Contributions:
    """What ``write_contributions`` wrote. Raises OSError."""
    found: dict[int, dict[int, object]] = {}
    for name, tensor in load_file(path).items():
        reduction, _, number = name.partition(".")
        found.setdefault(int(reduction), {})[int(number)] = tensor
    return [[found[i][j] for j in sorted(found[i])] for i in sorted(found)]  # type: ignore[misc]
