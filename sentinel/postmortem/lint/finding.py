"""What a lint rule is, and what it reports.

Owns the shapes. The rules are in ``rules/``, listed in ``registry.py``; reading source files is ``source.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sentinel.postmortem.lint.source import Source

PAGE = "deploy/LINT.md"


@dataclass(frozen=True, slots=True)
class Hit:
    """A place where a rule fires: the syntax node, and what is wrong there, in this code's own words."""

    node: ast.AST
    message: str


Check = Callable[["Source"], Iterator[Hit]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``why`` says in numbers how it goes wrong, ``fix`` what to write instead.

    ``ops`` are the operators (as replay names them, without namespace and overload) at which the first nonfinite value of such
    code is born, so that a located operation finds its rule.
    """

    id: str
    why: str
    fix: str
    check: Check
    ops: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A rule that fired. ``line`` counts from 1, ``column`` too; ``end_line`` is the last line of the code in question."""

    path: str
    line: int
    column: int
    rule: str
    message: str
    why: str
    fix: str
    end_line: int = 0

    @property
    def page(self) -> str:
        """Where the rule is explained, with examples."""
        return f"{PAGE}#{self.rule}"
