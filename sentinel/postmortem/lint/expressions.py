"""What expressions mean to a rule: operators however they are written, numbers, and where a dtype or an epsilon is named.

Owns the reading of single expressions. Following a name to where it was bound is ``flow.py``'s.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sentinel.postmortem.lint.source import Source, dotted

EPSILON = re.compile(r"eps|tiny|smooth|delta|stabil|jitter|floor", re.IGNORECASE)
MASK = re.compile(
    r"mask|valid|keep|non_?pad|not_?pad|present|selected|active|n_tokens|num_tokens|is_real", re.IGNORECASE
)
CLAMPS = frozenset(
    {"clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_", "maximum", "nan_to_num", "where", "fmax"}
)
# Operations through which a value passes without changing its size: what was guarded before is guarded after.
SHAPES = frozenset(
    [
        "unsqueeze",
        "squeeze",
        "view",
        "reshape",
        "expand",
        "expand_as",
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "type_as",
        "detach",
        "item",
        "contiguous",
        "clone",
        "flatten",
        "permute",
        "transpose",
        "t",
        "cpu",
        "cuda",
        "view_as",
        "repeat",
        "repeat_interleave",
        "broadcast_to",
        "gather",
        "index_select",
        "chunk",
    ]
)


@dataclass(frozen=True, slots=True)
class Operation:
    """A tensor operation, whether written ``torch.f(x, …)`` or ``x.f(…)``."""

    name: str
    subject: ast.expr | None
    arguments: tuple[ast.expr, ...]
    keywords: dict[str, ast.expr]
    call: ast.Call


def operation(source: Source, node: ast.AST | None) -> Operation | None:
    """The tensor operation that ``node`` calls; None for calls of other libraries, plain functions and modules."""
    if not isinstance(node, ast.Call):
        return None
    keywords = {k.arg: k.value for k in node.keywords if k.arg}
    full = source.canonical(node.func)
    root = dotted(node.func).partition(".")[0]
    if full and root in source.imports:
        if not full.startswith("torch."):
            return None
        subject = node.args[0] if node.args else keywords.get("input")
        return Operation(full.rpartition(".")[2], subject, tuple(node.args[1:]), keywords, node)
    if isinstance(node.func, ast.Attribute):
        return Operation(node.func.attr, node.func.value, tuple(node.args), keywords, node)
    return None


def argument(op: Operation, position: int, *names: str) -> ast.expr | None:
    """An argument by its position after the subject, or by one of its names."""
    named = next((op.keywords[name] for name in names if name in op.keywords), None)
    return named if named is not None else op.arguments[position] if len(op.arguments) > position else None


def number(node: ast.AST | None) -> float | None:
    """The value of a literal number, with its sign and simple arithmetic; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = number(node.operand)
        return inner if inner is None or isinstance(node.op, ast.UAdd) else -inner
    if isinstance(node, ast.BinOp):
        return _arithmetic(node.op, number(node.left), number(node.right))
    return None


def _arithmetic(op: ast.operator, left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return None
    try:
        if isinstance(op, ast.Mult):
            return left * right
        if isinstance(op, ast.Div):
            return left / right
        if isinstance(op, ast.Pow):
            return float(left**right)
    except (OverflowError, ZeroDivisionError, TypeError):
        pass
    return None


def is_negative_infinity(source: Source, node: ast.AST | None) -> bool:
    """``float("-inf")``, ``-torch.inf``, ``-math.inf``, ``-float("inf")`` and the like."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return source.canonical(node.operand).endswith((".inf", ".infinity")) or _float_text(node.operand) == "inf"
    return _float_text(node) == "-inf" or (node is not None and source.canonical(node).endswith(".NINF"))


def _float_text(node: ast.AST | None) -> str:
    if isinstance(node, ast.Call) and dotted(node.func) == "float" and len(node.args) == 1:
        given = node.args[0]
        return str(given.value).strip().lower() if isinstance(given, ast.Constant) else ""
    return ""


def is_half(source: Source, node: ast.AST | None) -> bool:
    """True for ``torch.float16`` and ``torch.half``."""
    return node is not None and source.canonical(node) in ("torch.float16", "torch.half")


def is_epsilon(node: ast.AST) -> bool:
    """True for a positive literal number and for names that speak of a small constant."""
    value = number(node)
    if value is not None:
        return value > 0
    return any(EPSILON.search(name) for name in identifiers(node))


def identifiers(node: ast.AST) -> Iterator[str]:
    """Every name and attribute in an expression."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr


def last_name(node: ast.AST) -> str:
    """The name an expression is called by: ``mask`` for ``batch.mask.float()`` and for ``batch["mask"]``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        key = node.slice
        return str(key.value) if isinstance(key, ast.Constant) and isinstance(key.value, str) else last_name(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return last_name(node.func.value)
    return last_name(node.operand) if isinstance(node, ast.UnaryOp) else ""


def is_mask(node: ast.AST) -> bool:
    """True for what selects: a comparison, its negation, or something called a mask."""
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return True
    return bool(MASK.search(last_name(node)))
