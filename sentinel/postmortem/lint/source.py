"""One source file as rules see it: syntax tree with parents, imports resolved, and which findings its author silenced.

Owns reading, and imported names. What expressions mean is ``expressions.py``'s, where values come from ``flow.py``'s. Nothing is
imported or executed.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeVar, cast, overload

A = TypeVar("A", bound=ast.AST)
B = TypeVar("B", bound=ast.AST)
C = TypeVar("C", bound=ast.AST)
T = TypeVar("T")
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef

_IGNORE = re.compile(r"#\s*sentinel:\s*ignore(?:\[([\w\s,\-]*)\])?")
_HALF = {"torch.float16", "torch.half"}


class SourceRefused(Exception):
    """The file cannot be linted; the text says why in one line."""


class Source:
    """A parsed file."""

    def __init__(self, path: str, text: str) -> None:
        """Parse. Raises SourceRefused if it is not Python."""
        self.path = path
        self.text = text
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SyntaxWarnings are about the linted file's own taste
                self.tree = ast.parse(text, path)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            where = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
            raise SourceRefused(f"{path} is not Python: {where}{getattr(error, 'msg', error)}") from error
        self._nodes: dict[type[ast.AST], list[tuple[int, ast.AST]]] = defaultdict(list)
        self._scoped: dict[tuple[ast.AST, type[ast.AST]], list[tuple[int, ast.AST]]] = defaultdict(list)
        self._parents: dict[ast.AST, ast.AST] = {}
        self._answers: dict[tuple[str, ast.AST], object] = {}
        self._index()

    def _index(self) -> None:
        """Number the nodes in the order of the text, and sort them by kind and by the function they belong to."""
        stack: list[tuple[ast.AST, Scope]] = [(self.tree, self.tree)]
        count = 0
        while stack:
            node, scope = stack.pop()
            count += 1
            self._nodes[type(node)].append((count, node))
            self._scoped[scope, type(node)].append((count, node))
            inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else scope
            children = list(ast.iter_child_nodes(node))
            self._parents.update(dict.fromkeys(children, node))
            stack += [(child, inner) for child in reversed(children)]

    @overload
    def every(self, kind: type[A], /) -> list[A]: ...
    @overload
    def every(self, kind: type[A], second: type[B], /) -> list[A | B]: ...
    @overload
    def every(self, kind: type[A], second: type[B], third: type[C], /) -> list[A | B | C]: ...
    def every(self, *kinds: type[ast.AST]) -> list[Any]:
        """All nodes of these kinds, in the order of the text."""
        return _in_order([self._nodes[kind] for kind in kinds if kind in self._nodes])

    def inside(self, scope: Scope, *kinds: type[ast.AST]) -> list[Any]:
        """Nodes of these kinds that belong to ``scope`` itself, not to a function inside it, in the order of the text."""
        return _in_order([self._scoped[scope, kind] for kind in kinds if (scope, kind) in self._scoped])

    def once(self, what: str, scope: Scope, make: Callable[[], T]) -> T:
        """The answer to a question about a function, worked out the first time it is asked."""
        if (what, scope) not in self._answers:
            self._answers[what, scope] = make()
        return cast("T", self._answers[what, scope])

    def parents(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around ``node``, innermost first."""
        while (outer := self._parents.get(node)) is not None:
            yield outer
            node = outer

    def parent(self, node: ast.AST) -> ast.AST | None:
        """The node directly around ``node``."""
        return self._parents.get(node)

    def scope(self, node: ast.AST) -> Scope:
        """The function around ``node``, or the module."""
        for outer in self.parents(node):
            if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
                return outer
        return self.tree

    def statement(self, node: ast.AST) -> ast.AST:
        """The statement that ``node`` is part of."""
        if isinstance(node, ast.stmt):
            return node
        return next((outer for outer in self.parents(node) if isinstance(outer, ast.stmt)), node)

    def canonical(self, node: ast.AST) -> str:
        """``torch.nn.functional.relu`` for ``F.relu``: the dotted name with import aliases resolved; empty if it is not one."""
        name = dotted(node)
        root, _, rest = name.partition(".")
        full = self.imports.get(root)
        return name if full is None else f"{full}.{rest}" if rest else full

    @cached_property
    def imports(self) -> dict[str, str]:
        """Every imported name and what it stands for."""
        found: dict[str, str] = {}
        for node in self.every(ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = name
        for imported in self.every(ast.ImportFrom):
            module = "." * imported.level + (imported.module or "")
            found |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in imported.names}
        return found

    @cached_property
    def uses_torch(self) -> bool:
        """True if the file imports torch, or something that is built on it."""
        roots = {full.partition(".")[0] for full in self.imports.values()}
        return any(re.search(r"torch|lightning|accelerate|deepspeed", root) for root in roots)

    @cached_property
    def names_half(self) -> bool:
        """True if float16 appears as code: a dtype, ``.half()``, or a string of a precision setting."""
        return (
            any(self.canonical(node) in _HALF for node in self.every(ast.Attribute, ast.Name))
            or any(isinstance(c.func, ast.Attribute) and c.func.attr == "half" and not c.args for c in self.calls)
            or any(c.value in ("fp16", "float16", "16-mixed") for c in self.every(ast.Constant))
        )

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls, in the order of the text."""
        return self.every(ast.Call)

    def is_silenced(self, rule: str, first: int, last: int) -> bool:
        """True if a comment ``# sentinel: ignore[rule]`` stands on one of these lines (or alone on the line above)."""
        for line in range(first - 1, last + 1):
            rules, alone = self._silenced.get(line, (frozenset(), False))
            if (line >= first or alone) and ("*" in rules or rule in rules):
                return True
        return False

    @cached_property
    def calls_by_name(self) -> dict[str, list[ast.Call]]:
        """All calls by the last part of what is called: ``self.norm(x)`` under ``norm``."""
        found: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            found[dotted(call.func).rpartition(".")[2]].append(call)
        return found

    @cached_property
    def _silenced(self) -> dict[int, tuple[frozenset[str], bool]]:
        found: dict[int, tuple[frozenset[str], bool]] = {}
        try:
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
                if match:
                    named = frozenset(word.strip() for word in (match[1] or "*").split(","))
                    found[token.start[0]] = (named, not token.line[: token.start[1]].strip())
        except (tokenize.TokenError, SyntaxError):
            pass  # it parsed, so only what follows the last token is odd
        return found


def _in_order(found: list[list[tuple[int, ast.AST]]]) -> list[ast.AST]:
    merged = found[0] if len(found) == 1 else sorted((pair for one in found for pair in one), key=lambda pair: pair[0])
    return [node for _, node in merged]


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain, empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def code(node: ast.AST, limit: int = 60) -> str:
    """A node as text, on one line, cut at ``limit`` characters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def same(a: ast.AST, b: ast.AST) -> bool:
    """True if two expressions read alike, whether they are read or assigned to."""
    return ast.unparse(a) == ast.unparse(b)
