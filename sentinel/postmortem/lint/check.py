"""Linting: rules run over files, findings sorted, silenced ones dropped.

Owns which files are read and which rules are asked. Rendering is ``output.py``'s; finding the lint for an operation that replay
has located is ``located.py``'s.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sentinel.postmortem.lint.finding import Finding, Hit, Rule
from sentinel.postmortem.lint.registry import RULES
from sentinel.postmortem.lint.source import Source, SourceRefused

MAX_FILE_BYTES = 4 << 20
_SKIPPED_FOLDERS = {".git", ".venv", "venv", "node_modules", "__pycache__", "build", "dist", ".tox"}


@dataclass(slots=True)
class LintResult:
    """What a run over files gave: findings in order, how many files were read, and why some were not."""

    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    refused: list[str] = field(default_factory=list)


def chosen_rules(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> list[Rule]:
    """The rules to ask. Raises KeyError with the first name that is no rule."""
    for name in (*select, *ignore):
        if name not in RULES:
            raise KeyError(name)
    return [rule for name, rule in RULES.items() if (not select or name in select) and name not in ignore]


def lint_text(text: str, path: str, rules: Iterable[Rule] = tuple(RULES.values())) -> list[Finding]:
    """Findings of one file, by place. Raises SourceRefused if it is not Python."""
    source = Source(path, text)
    if not source.uses_torch:
        return []
    found = {_finding(source, rule, hit) for rule in rules for hit in rule.check(source)}
    return sorted(f for f in found if not source.is_silenced(f.rule, f.line, f.end_line))


def lint_paths(paths: Iterable[Path], rules: Sequence[Rule]) -> LintResult:
    """Findings of files, and of all Python files below folders."""
    result = LintResult()
    for path in _files(paths):
        try:
            result.findings += lint_text(read_source(path), str(path), rules)
            result.files += 1
        except SourceRefused as refusal:
            result.refused.append(str(refusal))
    return result


def read_source(path: Path) -> str:
    """A source file's text. Raises SourceRefused with one line if it cannot be read."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SourceRefused(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SourceRefused(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise SourceRefused(f"{path} cannot be read ({error.strerror})") from error


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for inner in sorted(path.rglob("*.py")):
            if not _SKIPPED_FOLDERS & set(inner.relative_to(path).parts[:-1]):
                yield inner


def _finding(source: Source, rule: Rule, hit: Hit) -> Finding:
    node = hit.node
    assert isinstance(node, ast.expr | ast.stmt), "a hit is a place in the text"
    first = node.lineno
    return Finding(
        source.path, first, node.col_offset + 1, rule.id, hit.message, rule.why, rule.fix, node.end_lineno or first
    )
