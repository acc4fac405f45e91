"""The training script of a bundle, and what lint says of it, if it is on this host.

Owns the way from a recorded command line to a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sentinel.bundle.manifest import PartHeader
from sentinel.postmortem.lint.check import lint_text, read_source
from sentinel.postmortem.lint.finding import Finding
from sentinel.postmortem.lint.source import SourceRefused


def script_path(header: PartHeader) -> Path | None:
    """The Python file that was run, None if the command line names none that is here."""
    environment = header.environment
    first = next((word for word in environment.argv if word.endswith(".py")), None)
    if first is None:
        return None
    path = Path(first) if Path(first).is_absolute() else Path(environment.cwd, first)
    return path if path.is_file() else None


def script_findings(headers: Sequence[PartHeader]) -> tuple[str, tuple[Finding, ...]]:
    """Name of the script, empty if it is not here, and its findings."""
    path = script_path(headers[0]) if headers else None
    if path is None:
        return "", ()
    try:
        return str(path), tuple(lint_text(read_source(path), path.name))
    except SourceRefused:
        return "", ()
