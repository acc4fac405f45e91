"""The rules of the house that no type checker knows: sizes, names, imports, and what product code never does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = sorted([*ROOT.glob("sentinel/**/*.py"), *ROOT.glob("agents/**/*.py")])
SCRIPTS = sorted(ROOT.glob("scripts/**/*.py"))
TESTS = sorted(ROOT.glob("tests/**/*.py"))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
BANNED_WORDS = {"manager", "handler", "helper", "helpers", "utils", "util", "common", "engine", "misc", "constants"}
BANNED_NAMES = {"data", "info"}

# One file per process reads the environment (see sentinel/wire/names.py); the coordinator's settings do it through pydantic.
ENVIRONMENT_READERS = {
    "agents/sentinel_agent/config.py",
    "agents/sentinel_agent/environment.py",  # records variables in a bundle; takes no setting from them
    "sentinel/launch/options.py",
}
# sitecustomize runs before anything of ours can be imported.
ENVIRONMENT_READERS |= {str(p.relative_to(ROOT)) for p in ROOT.glob("agents/sentinel_agent/inject/**/*.py")}


# Where a fault of ours could otherwise reach the host or stop a loop; each is counted, or said in a line.
BROAD_EXCEPTS = {
    "agents/sentinel_agent/errors.py",  # the guard around every hook
    "agents/sentinel_agent/process.py",  # the same, while there is no agent yet
    "agents/sentinel_agent/inject/hooks.py",  # the same, inside the import of torch
    "agents/sentinel_agent/channel.py",  # the rank's channel thread
    "agents/sentinel_agent/replay/runner.py",  # whatever the user's script raises is what came of a replay
    "sentinel/launch/relay.py",  # the node's channel thread
    "sentinel/launch/launcher.py",  # what is beside the job, before it and after it
    "sentinel/coordinator/faults.py",  # the server, per message
    "sentinel/coordinator/access.py",  # the pages, per request
}


def relative(path: Path) -> str:
    """Path below the checkout."""
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of a file, methods and nested ones too."""
    yield from (n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    assert function.end_lineno is not None
    first = function.body[0]
    documented = ast.get_docstring(function) is not None
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return function.end_lineno - function.lineno + 1 - docstring


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute chain, empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def imported(path: Path) -> set[str]:
    """Top-level names of every module that a file imports, at any depth of it."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_import_rules_hold() -> None:
    """import-linter finds no import that breaks the layers."""
    ran = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("path", PRODUCT, ids=relative)
def test_files_stay_small(path: Path) -> None:
    """No file of the product is longer than 400 lines, no function longer than 80."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    long = {f.name: body_lines(f) for f in functions(path) if body_lines(f) > MAX_FUNCTION_LINES}
    assert not long


def test_functions_are_short_by_habit() -> None:
    """Half of all functions of the product have fewer than 12 lines."""
    lengths = sorted(body_lines(f) for path in PRODUCT for f in functions(path))
    assert lengths[len(lengths) // 2] < 12


@pytest.mark.parametrize("path", PRODUCT, ids=relative)
def test_modules_say_what_they_own(path: Path) -> None:
    """Every module begins with a docstring; inside packages __init__.py is empty, but for the two roots."""
    if path.name == "__init__.py" and path.parent.name not in ("sentinel", "sentinel_agent"):
        assert path.read_text() == ""
        return
    assert ast.get_docstring(tree(path))


@pytest.mark.parametrize("path", PRODUCT, ids=relative)
def test_names_are_the_fields_own(path: Path) -> None:
    """No file, class or function is called manager, handler, helper, utils, common or engine; nothing is called data or info."""
    words = set(re.split(r"[_./]", relative(path).removesuffix(".py")))
    bound: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef):
            words |= {word.lower() for word in re.findall(r"[A-Z][a-z]+", node.name)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            words |= set(node.name.lower().split("_"))
            bound |= {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    assert not words & BANNED_WORDS
    assert not bound & BANNED_NAMES


@pytest.mark.parametrize("path", [*PRODUCT, *SCRIPTS], ids=relative)
def test_nothing_is_unpickled(path: Path) -> None:
    """No pickle, no torch.load without weights_only=True, no DCP load: a bundle or a file cannot run code."""
    assert not {
        m for m in imported(path) if m.split(".")[0] in ("pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
    }
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name == "torch.load":
            given = {k.arg: k.value for k in node.keywords}
            assert isinstance(given.get("weights_only"), ast.Constant), (
                f"line {node.lineno}: weights_only=True must be explicit"
            )
            assert given["weights_only"].value is True  # type: ignore[union-attr]
        assert name not in ("dcp.load", "torch.distributed.checkpoint.load", "eval", "exec"), (
            f"line {node.lineno}: {name}"
        )


@pytest.mark.parametrize("path", PRODUCT, ids=relative)
def test_one_file_per_process_reads_the_environment(path: Path) -> None:
    """os.environ and os.getenv appear only in the file that owns the process's settings."""
    reads = [
        n for n in ast.walk(tree(path)) if isinstance(n, ast.Attribute) and dotted(n) in ("os.environ", "os.getenv")
    ]
    if relative(path) not in ENVIRONMENT_READERS:
        assert not reads, f"line {reads[0].lineno}"


def test_the_core_is_pure() -> None:
    """The core knows no socket, clock, thread, log or metric: only the wire's messages and its own modules."""
    allowed = {"sentinel", "pydantic", "__future__", "collections", "dataclasses", "datetime", "enum", "typing", "math"}
    allowed |= {"itertools", "functools", "bisect", "heapq", "operator", "statistics", "hashlib", "re"}
    for path in ROOT.glob("sentinel/incidents/*.py"):
        assert {m.split(".")[0] for m in imported(path)} <= allowed, relative(path)
        ours = {m for m in imported(path) if m.startswith("sentinel")}
        assert all(m.startswith(("sentinel.wire", "sentinel.incidents", "sentinel.bundle")) for m in ours), relative(
            path
        )
        assert "now(" not in path.read_text(), f"{relative(path)}: time is an argument"


def test_broad_excepts_are_where_they_may_be() -> None:
    """Anything may be caught only at five kinds of place, once in each file, and nothing is caught without a name."""
    found: list[str] = []
    for path in PRODUCT:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{relative(path)}:{node.lineno}"
                passed_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                if dotted(node.type) in ("Exception", "BaseException") and not passed_on:
                    found.append(relative(path))
    assert len(found) == len(set(found)), sorted(found)
    assert set(found) <= BROAD_EXCEPTS, sorted(set(found) - BROAD_EXCEPTS)


def test_tests_say_what_they_hold() -> None:
    """Every test function has a docstring of one sentence or more."""
    silent = [
        f"{relative(path)}::{f.name}"
        for path in TESTS
        for f in functions(path)
        if f.name.startswith("test_") and not ast.get_docstring(f)
    ]
    assert not silent


def test_tests_are_no_package() -> None:
    """No __init__.py below tests or agents: importlib mode needs none, and a package ``agents`` is somebody else's."""
    assert not list(ROOT.glob("tests/**/__init__.py"))
    assert not (ROOT / "agents" / "__init__.py").exists()


def test_no_import_cycle() -> None:
    """The modules of the product import each other without a cycle."""
    modules = {relative(p).removesuffix(".py").removeprefix("agents/").replace("/", "."): p for p in PRODUCT}
    edges = {name: sorted(_runtime_imports(path) & set(modules)) for name, path in modules.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for other in edges[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in modules:
        visit(name, ())


def _runtime_imports(path: Path) -> set[str]:
    """Modules imported when a file is loaded: not under TYPE_CHECKING, not inside functions."""
    found: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found
