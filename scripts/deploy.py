"""Writes the deployment files that the code already knows: rules, the operator's rules, dashboards, the API's description.

usage: scripts/deploy.py [--check]      (with --check nothing is written; exit 1 if a file is out of date)
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))


def files() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    from dashboards import dashboards

    from sentinel.coordinator.exports.openapi import openapi
    from sentinel.coordinator.exports.rules import operator_rules, prometheus_rules

    places = (ROOT / "sentinel" / "coordinator" / "exports" / "dashboards", ROOT / "deploy" / "grafana" / "dashboards")
    return {
        **{place / f"{uid}.json": text for uid, text in dashboards().items() for place in places},
        ROOT / "deploy" / "openapi.json": openapi(),
        ROOT / "deploy" / "prometheus" / "sentinel.rules.yml": prometheus_rules(),
        ROOT / "deploy" / "kubernetes" / "monitoring" / "rules.yaml": operator_rules(),
    }


def main() -> int:
    """Renew or check every file."""
    check = "--check" in sys.argv[1:]
    stale = [path for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files()[path], encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'is out of date: run scripts/deploy.py' if check else 'renewed'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
