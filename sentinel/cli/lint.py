"""``sentinel lint``: training code that can go nonfinite, found without running it.

Owns the command. The rules are ``postmortem/lint/``.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sentinel.cli.output import ExitCode, fail, put, say, say_error
from sentinel.postmortem.lint.check import chosen_rules, lint_paths
from sentinel.postmortem.lint.finding import Rule
from sentinel.postmortem.lint.output import explanation, json_report, text_report
from sentinel.postmortem.lint.registry import RULES


class LintFormat(StrEnum):
    """What ``lint`` can print."""

    TEXT = "text"
    JSON = "json"


def lint(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE…", help="Python files, or folders to search for them.")
    ] = None,
    form: Annotated[LintFormat, typer.Option("--format", help="text for people, json for programs.")] = LintFormat.TEXT,
    select: Annotated[str, typer.Option("--select", metavar="RULE,…", help="Only these rules.")] = "",
    ignore: Annotated[str, typer.Option("--ignore", metavar="RULE,…", help="All rules but these.")] = "",
    explain: Annotated[str, typer.Option("--explain", metavar="RULE", help="Explain one rule (or all).")] = "",
) -> None:
    """Find training code that can go nonfinite, without running it. Exits 3 if it found something, 1 if a file cannot be read."""
    if explain:
        put("\n\n".join(explanation(rule) for rule in (RULES.values() if explain == "all" else _rules(explain, ""))))
        return
    if not files:
        fail("no file named", "sentinel lint train.py, or sentinel lint src/", ExitCode.USAGE)
    result = lint_paths(files, _rules(select, ignore))
    if form is LintFormat.JSON:
        put(json_report(result))
    elif result.findings:
        put(text_report(result.findings))
    for line in result.refused:
        say_error(line)
    if form is LintFormat.TEXT:
        say(f"{len(result.findings)} finding(s) in {result.files} file(s)")
    if result.findings:
        raise typer.Exit(int(ExitCode.INCIDENTS_FOUND))
    if result.refused:
        raise typer.Exit(int(ExitCode.FAILURE))


def _rules(select: str, ignore: str) -> list[Rule]:
    try:
        return chosen_rules(_names(select), _names(ignore))
    except KeyError as error:
        fail(f"no rule {error.args[0]}", f"the rules are: {', '.join(RULES)}", ExitCode.USAGE)


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]
