"""The Grafana dashboards that come with Sentinel.

Owns finding them in the package. They are written by ``scripts/dashboards.py``, which needs Grafana's SDK; reading them does not.
"""

from __future__ import annotations

from importlib.resources import files


def dashboards() -> dict[str, str]:
    """JSON text of every dashboard, by its file's name."""
    folder = files("sentinel.coordinator.exports") / "dashboards"
    return {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.name.endswith(".json")}
