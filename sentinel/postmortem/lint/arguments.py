"""What a parameter is called with in its own file: an epsilon that the caller sets to zero protects nothing.

Owns that one question. Only literal numbers count, through at most a few calls; anything else is "not zero".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sentinel.postmortem.lint.expressions import number
from sentinel.postmortem.lint.source import Source

DEPTH = 4

Function = ast.FunctionDef | ast.AsyncFunctionDef


def may_be_zero(source: Source, node: ast.expr, depth: int = DEPTH) -> bool:
    """True if ``node`` is a parameter that some call in the file (or its default) sets to 0."""
    if number(node) is not None:
        return number(node) == 0
    scope = source.scope(node)
    if depth == 0 or not isinstance(node, ast.Name) or isinstance(scope, ast.Module):
        return False
    return any(may_be_zero(source, given, depth - 1) for given in _given(source, scope, node.id))


def _given(source: Source, function: Function, parameter: str) -> Iterator[ast.expr]:
    """The expressions that calls in the file pass for a parameter; its default where no call names it."""
    positional = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    calls = source.calls_by_name.get(function.name, ())
    is_method = positional[:1] in (["self"], ["cls"])
    named = False
    for call in calls:
        found = next((k.value for k in call.keywords if k.arg == parameter), None)
        place = positional.index(parameter) - is_method if parameter in positional else -1
        if found is None and 0 <= place < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args):
            found = call.args[place]
        if found is not None:
            named = True
            yield found
    default = _default(function, parameter)
    if default is not None and not named:
        yield default


def _default(function: Function, parameter: str) -> ast.expr | None:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    pairs = [
        *zip(with_default, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return next((value for one, value in pairs if one.arg == parameter), None)
