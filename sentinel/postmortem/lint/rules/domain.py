"""Rules for functions at the edge of where they are defined: log, sqrt, acos, and the branch of `where` that is not taken."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sentinel.postmortem.lint.expressions import Operation, argument, number, operation
from sentinel.postmortem.lint.finding import Hit, Rule
from sentinel.postmortem.lint.flow import core, resolve
from sentinel.postmortem.lint.guards import is_bounded, is_guarded, without_gradient
from sentinel.postmortem.lint.source import Source, code, same

_LOGS = ("log", "log2", "log10")
_PROBABILITIES = ("softmax", "sigmoid")


def _operations(source: Source, *names: str) -> Iterator[Operation]:
    for call in source.calls:
        op = operation(source, call)
        if op is not None and op.name in names and op.subject is not None:
            yield op


def _p_log_p(source: Source) -> Iterator[Hit]:
    for node in source.every(ast.BinOp):
        if not isinstance(node.op, ast.Mult):
            continue
        for p, other in ((node.left, node.right), (node.right, node.left)):
            op = operation(source, resolve(source, other))
            if op is None or op.name not in _LOGS or op.subject is None or is_guarded(source, op.subject):
                continue
            if same(op.subject, p) and number(p) is None:
                yield Hit(node, f"`{code(node)}` is 0 * -inf = NaN where `{code(p)}` is 0")
                break


def _log_of_probability(source: Source) -> Iterator[Hit]:
    products = {hit.node for hit in _p_log_p(source)}
    for op in _operations(source, *_LOGS):
        inner = core(source, op.subject)
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub) and number(inner.left) == 1:
            inner = core(source, inner.right)
        found = operation(source, inner)
        if found is None or found.name not in _PROBABILITIES or is_guarded(source, op.subject):
            continue
        if not any(outer in products for outer in source.parents(op.call)) and not _feeds(source, op.call, products):
            yield Hit(op.call, f"`{code(op.call)}` is -inf where the {found.name} rounds to 0 or 1")


def _feeds(source: Source, call: ast.Call, products: set[ast.AST]) -> bool:
    """True if the log's value is only named first and multiplied later."""
    statement = source.parent(call)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return False
    name = statement.targets[0].id
    return any(isinstance(part, ast.Name) and part.id == name for product in products for part in ast.walk(product))


def _log_of_exp(source: Source) -> Iterator[Hit]:
    for op in _operations(source, *_LOGS, "log1p"):
        inner = resolve(source, op.subject)
        found = operation(source, inner)
        if op.name == "log1p":
            exp = found
            shape = "log1p(exp(x))"
        elif isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Add):
            sides = [operation(source, resolve(source, s)) for s in (inner.left, inner.right)]
            one = any(number(s) == 1 for s in (inner.left, inner.right))
            exp = next((s for s in sides if s is not None and s.name == "exp"), None) if one else None
            shape = "log(1 + exp(x))"
        else:
            exp = operation(source, resolve(source, found.subject)) if found and found.name == "sum" else None
            shape = "log(exp(x).sum())"
        if exp is not None and exp.name == "exp" and not is_bounded(source, exp.subject):
            yield Hit(op.call, f"`{code(op.call)}` overflows in exp: {shape} by hand")


def _sqrt(source: Source) -> Iterator[Hit]:
    for node, subject, inverse in _roots(source):
        squares = _zero_at_equality(source, subject, inverse)
        if squares is not None and not is_guarded(source, subject) and not without_gradient(source, node):
            what = "is inf" if inverse else "has an infinite gradient"
            yield Hit(node, f"`{code(node)}` {what} where `{code(squares)}` is 0")


def _roots(source: Source) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    """Every square root of a tensor: its node, its operand, and whether it is the reciprocal one."""
    for op in _operations(source, "sqrt", "rsqrt"):
        if op.subject is not None:
            yield op.call, op.subject, op.name == "rsqrt"
    for op in _operations(source, "pow"):
        exponent = number(argument(op, 0, "exponent"))
        if op.subject is not None and exponent in (0.5, -0.5):
            yield op.call, op.subject, exponent < 0
    for node in source.every(ast.BinOp):
        exponent = number(node.right) if isinstance(node.op, ast.Pow) else None
        if exponent in (0.5, -0.5):
            yield node, node.left, exponent < 0


def _zero_at_equality(source: Source, subject: ast.expr, inverse: bool) -> ast.expr | None:
    """What is 0 for two equal points: a sum of squared differences. For a reciprocal any sum of squares or variance."""
    inner = core(source, subject)
    op = operation(source, inner)
    if op is not None and op.name == "var":
        return inner if inverse else None
    if op is None or op.name not in ("sum", "mean"):
        return None
    squared = _squared(source, op.subject)
    if squared is None:
        return None
    difference = core(source, squared)
    is_difference = isinstance(difference, ast.BinOp) and isinstance(difference.op, ast.Sub)
    return inner if is_difference or inverse else None


def _squared(source: Source, node: ast.expr | None) -> ast.expr | None:
    inner = resolve(source, node)
    if isinstance(inner, ast.BinOp):
        if isinstance(inner.op, ast.Pow) and number(inner.right) == 2:
            return inner.left
        return inner.left if isinstance(inner.op, ast.Mult) and same(inner.left, inner.right) else None
    op = operation(source, inner)
    if op is not None and (op.name == "square" or (op.name == "pow" and number(argument(op, 0, "exponent")) == 2)):
        return op.subject
    return None


def _acos(source: Source) -> Iterator[Hit]:
    for op in _operations(source, "acos", "arccos", "asin", "arcsin", "atanh", "arctanh"):
        if op.subject is None or number(op.subject) is not None or is_guarded(source, op.subject):
            continue
        if not without_gradient(source, op.call) and not _is_shrunk(source, op.subject):
            yield Hit(
                op.call, f"`{code(op.call)}` has an infinite gradient at ±1 and is NaN beyond, where rounding can land"
            )


def _is_shrunk(source: Source, node: ast.expr) -> bool:
    """``x * (1 - eps)`` keeps away from the edge."""
    inner = core(source, node)
    return isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Mult)


def _where(source: Source) -> Iterator[Hit]:
    for call in source.calls:
        if source.canonical(call.func) != "torch.where" or len(call.args) != 3 or without_gradient(source, call):
            continue
        tested = _compared(source, call.args[0])
        for branch in call.args[1:]:
            for part, operand in _edges(source, branch):
                if ast.dump(operand) in tested and not is_guarded(source, operand):
                    yield Hit(
                        part,
                        f"`{code(part)}` is taken for all elements; where it is not selected, 0 * inf = NaN comes back",
                    )


def _compared(source: Source, condition: ast.expr) -> set[str]:
    """The values that a condition compares with something."""
    test = resolve(source, condition)
    return {ast.dump(side) for side in (test.left, *test.comparators)} if isinstance(test, ast.Compare) else set()


def _edges(source: Source, branch: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Operations of a branch whose derivative is infinite at 0, each with its operand."""
    inner = resolve(source, branch)
    for node in ast.walk(inner) if inner is not None else ():
        op = operation(source, node)
        if op is not None and op.subject is not None and op.name in ("sqrt", "rsqrt", "reciprocal", *_LOGS):
            yield op.call, op.subject
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and number(node.right) is None:
            yield node, node.right


RULES = (
    Rule(
        "p_log_p",
        "Where a probability rounds to 0 (in float32 a logit 104 below the largest; in float16 one 17 below), log gives -inf and "
        "0 * -inf is NaN.",
        "take log_softmax of the logits for the log, torch.special.entr(p), or torch.xlogy(p, p)",
        _p_log_p,
        frozenset({"log", "log2", "mul", "xlogy"}),
    ),
    Rule(
        "log_of_probability",
        "A softmax or sigmoid rounds to 0 (or 1) for confident predictions: sigmoid(17) is exactly 1 in float32, so log(1 - p) is "
        "-inf and its gradient 1/0.",
        "use log_softmax or logsigmoid of the logits",
        _log_of_probability,
        frozenset({"log", "log2", "log10"}),
    ),
    Rule(
        "log_of_exp",
        "exp overflows float32 at 88.7 and float16 at 11.1; the log of inf is inf although the true value is about x.",
        "torch.logsumexp(x, dim) or torch.nn.functional.softplus(x)",
        _log_of_exp,
        frozenset({"exp", "log", "log1p", "sum"}),
    ),
    Rule(
        "sqrt_without_eps",
        "The derivative of sqrt at 0 is 1/0 = inf, times the inner derivative 0 it is NaN: the loss is finite, the gradient is "
        "not. Two equal points are enough.",
        "add an epsilon inside: torch.sqrt(d2 + 1e-12), or clamp it",
        _sqrt,
        frozenset({"sqrt", "rsqrt", "pow", "linalg_vector_norm", "div", "mul"}),
    ),
    Rule(
        "acos_without_clamp",
        "A cosine of unit vectors rounds to 1.0000001: acos is NaN there, and at exactly 1 its gradient is infinite.",
        "clamp first: torch.acos(c.clamp(-1 + 1e-6, 1 - 1e-6)), or use torch.atan2",
        _acos,
        frozenset({"acos", "asin", "atanh"}),
    ),
    Rule(
        "where_gradient",
        "torch.where computes both branches and sends gradient 0 into the one not taken; 0 times the infinite derivative there "
        "is NaN.",
        "make the operand safe first: safe = torch.where(x > 0, x, 1.0); torch.where(x > 0, safe.sqrt(), 0.0)",
        _where,
        frozenset({"where", "sqrt", "log", "div", "rsqrt", "reciprocal", "mul"}),
    ),
)
