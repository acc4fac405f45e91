"""``sentinel doctor``: is everything here that ``sentinel run`` needs?

Owns the command. What is looked at is in ``checks.py``.
"""

from __future__ import annotations

import json

import typer

from sentinel.cli.options import Output
from sentinel.cli.output import ExitCode, OutputFormat, put


def doctor(output: Output = OutputFormat.TABLE) -> None:
    """Check this environment: Python, torch, CURVE, limits, ports, injection. Exits 1 if a check failed."""
    from sentinel.cli.checks import Health, run_checks
    from sentinel.postmortem.text import columns

    results = run_checks()
    failed = [result for result in results if result.health is Health.FAILED]
    if output is OutputFormat.JSON:
        checks = [result.model_dump(mode="json") for result in results]
        put(json.dumps({"schema_version": 1, "ok": not failed, "checks": checks}, indent=1))
    else:
        put(columns(("CHECK", "HEALTH", "SEEN"), ((r.name, r.health, r.seen) for r in results)))
        for result in results:
            if result.hint:
                put(f"hint: {result.name}: {result.hint}")
    if failed:
        raise typer.Exit(int(ExitCode.FAILURE))
