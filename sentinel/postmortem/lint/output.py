"""Findings for people and for programs.

Owns the two formats. The JSON form is a contract: other programs read it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from sentinel.postmortem.lint.check import LintResult
from sentinel.postmortem.lint.finding import PAGE, Finding, Rule
from sentinel.postmortem.text import printable

SCHEMA_VERSION = 1
COLUMNS = 110


def text_report(findings: Sequence[Finding]) -> str:
    """One block per finding; a rule is explained at its first finding only."""
    blocks = []
    explained: set[str] = set()
    for finding in findings:
        lines = [_place(finding)]
        if finding.rule not in explained:
            lines += [*_wrapped("why", finding.why), *_wrapped("fix", finding.fix), f"    see  {finding.page}"]
        explained.add(finding.rule)
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def json_report(result: LintResult) -> str:
    """All findings and what could not be read."""
    record = {
        "schema_version": SCHEMA_VERSION,
        "files": result.files,
        "findings": [finding_record(finding) for finding in result.findings],
        "refused": result.refused,
    }
    return json.dumps(record, indent=1)


def finding_record(finding: Finding) -> dict[str, Any]:
    """One finding as JSON values."""
    return {
        "rule": finding.rule,
        "path": finding.path,
        "line": finding.line,
        "column": finding.column,
        "end_line": finding.end_line,
        "message": finding.message,
        "why": finding.why,
        "fix": finding.fix,
        "page": finding.page,
    }


def explanation(rule: Rule) -> str:
    """One rule, for ``--explain``."""
    return "\n".join([rule.id, *_wrapped("why", rule.why), *_wrapped("fix", rule.fix), f"    see  {PAGE}#{rule.id}"])


def _place(finding: Finding) -> str:
    path = printable(finding.path, 400)
    return f"{path}:{finding.line}:{finding.column}: {finding.rule}: {printable(finding.message, 400)}"


def _wrapped(label: str, text: str) -> list[str]:
    first, rest = f"    {label}  ", " " * 9
    return textwrap.wrap(
        text, COLUMNS, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
