"""The lint that explains an operation which replay has located: findings on its line, or elsewhere in the file for its operator.

Owns that match. Reads the one file that the line names; says nothing rather than guess.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from sentinel.postmortem.lint.check import lint_text, read_source
from sentinel.postmortem.lint.finding import Finding
from sentinel.postmortem.lint.registry import RULES
from sentinel.postmortem.lint.source import SourceRefused

_PLACE = re.compile(r"^(?P<path>.+?\.py):(?P<line>\d+)(?::\d+)?$")
_SNIPPET = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


def rules_for(op: str, line: str, folder: Path | None = None) -> list[Finding]:
    """Findings that explain ``op`` (as torch names it, ``aten.div.Tensor``) at ``line``, the most telling first.

    ``line`` is ``path.py:26``, a relative path being below ``folder`` (default: the working directory); or the code itself,
    which is then looked at alone. A file that cannot be read or parsed gives no findings.
    """
    place = _PLACE.match(line.strip())
    try:
        if place is None:
            return lint_text(_SNIPPET + textwrap.dedent(line).strip() + "\n", "<code>")
        path = Path(place["path"])
        read = path if path.is_absolute() or folder is None else folder / path
        return _ranked(lint_text(read_source(read), place["path"]), operator_name(op), int(place["line"]))
    except SourceRefused:
        return []


def operator_name(op: str) -> str:
    """``div`` for ``aten.div.Tensor``, ``aten::div`` and ``div``."""
    name = op.replace("::", ".")
    parts = name.split(".")
    return (
        parts[1] if len(parts) > 1 and parts[0] in ("aten", "c10d", "fsdp", "_c10d_functional", "prims") else parts[0]
    )


def _ranked(findings: list[Finding], op: str, line: int) -> list[Finding]:
    """On the line and about this operator; on the line; about this operator anywhere in the file, nearest first."""
    here = [f for f in findings if f.line <= line <= f.end_line]
    there = [f for f in findings if f not in here and op in RULES[f.rule].ops]
    here.sort(key=lambda f: op not in RULES[f.rule].ops)
    return here or sorted(there, key=lambda f: abs(f.line - line))
