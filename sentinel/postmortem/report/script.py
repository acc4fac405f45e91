"""The training script of a bundle, and what lint says of it, if it is on this host.

Owns the way from a recorded command line to a file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sentinel.bundle.manifest import PartHeader
from sentinel.postmortem.lint.check import lint_text, read_source
from sentinel.postmortem.lint.finding import Finding
from sentinel.postmortem.lint.source import SourceRefused
from sentinel.wire.names import RUN_FILE


def script_findings(headers: Sequence[PartHeader], run_dir: Path | None) -> tuple[str, tuple[Finding, ...]]:
    """Name of the script, empty if it is not here, and its findings."""
    path = _recorded(headers[0]) if headers else _launched(run_dir)
    if path is None:
        return "", ()
    try:
        return str(path), tuple(lint_text(read_source(path), path.name))
    except SourceRefused:
        return "", ()


def _recorded(header: PartHeader) -> Path | None:
    """The Python file that a part's process ran."""
    return _script(header.environment.argv, Path(header.environment.cwd))


def _launched(run_dir: Path | None) -> Path | None:
    """The Python file that the launcher was given, where no part says it: relative names count from here."""
    if run_dir is None:
        return None
    try:
        argv = json.loads((run_dir / RUN_FILE).read_text(encoding="utf-8"))["argv"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    words = argv if isinstance(argv, list) else []
    return _script([word for word in words if isinstance(word, str)], Path.cwd())


def _script(argv: Sequence[str], folder: Path) -> Path | None:
    first = next((word for word in argv if word.endswith(".py")), None)
    path = folder / first if first else None
    return path if path is not None and path.is_file() else None
