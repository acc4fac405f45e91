"""Writes the parts of the documents that the code already knows: module map, commands, exit codes, metrics.

usage: scripts/docs.py [--check]      (with --check nothing is written; exit 1 if a document is out of date)
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def module_map() -> str:
    """Every module of the product with the first sentence of its docstring, one block per package."""
    blocks = []
    for package in sorted({p.parent for p in _modules()}, key=lambda p: p.relative_to(ROOT)):
        lines = [f"- `{p.name}`: {_first_sentence(p)}" for p in sorted(_modules()) if p.parent == package]
        if lines:
            blocks.append(f"**{package.relative_to(ROOT)}/**\n\n" + "\n".join(lines))
    return "\n\n".join(blocks)


def commands() -> str:
    """Every command with the first line of its help."""
    rows = ["| command | what it does |", "|---|---|"]
    rows.append(
        "| `sentinel run` | torchrun with Sentinel watching: every torchrun flag, plus `--sentinel-*` (`sentinel run --help`) |"
    )
    rows += [f"| `{name}` | {help_} |" for name, help_ in command_help().items()]
    return "\n".join(rows)


def exit_codes() -> str:
    """Every exit code of the commands."""
    from sentinel.cli.output import EXIT_CODE_WORDS

    rows = [f"| {int(code)} | {words} |" for code, words in EXIT_CODE_WORDS.items()]
    return "\n".join(["| code | meaning |", "|---|---|", *rows])


def metrics() -> str:
    """Every metric that a coordinator serves."""
    from sentinel.coordinator.metric_table import METRICS

    suffixes = {"counter": "_total", "info": "_info"}
    rows = []
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        rows.append(f"| `{metric.name}{suffixes.get(metric.type, '')}` | {metric.type} | {labels} | {metric.help} |")
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])


def rules() -> str:
    """Every rule of the core, in the order of judgement."""
    from sentinel.incidents.table import TABLE

    lines = ["| rule | what was seen | kind | stage | suspects | severity |", "|---|---|---|---|---|---|"]
    for row in TABLE:
        kind = f"`{row.kind.value}`" if row.kind else "none, counted"
        stage, severity = (f"`{row.stage.value}`" if row.stage else "-"), (row.severity.value if row.severity else "-")
        lines.append(f"| `{row.rule}` | {row.seen} | {kind} | {stage} | {row.suspects} | {severity} |")
    return "\n".join(lines)


def command_help() -> dict[str, str]:
    """``sentinel …`` to the first line of its help, for every command of the typer tree."""
    import typer.main

    from sentinel.cli.app import app

    found: dict[str, str] = {}

    def visit(command: object, name: str) -> None:
        children = getattr(command, "commands", None)
        if children:
            for child, inner in children.items():
                visit(inner, f"{name} {child}")
        else:
            found[name] = (getattr(command, "help", None) or "").strip().split("\n")[0]

    visit(typer.main.get_command(app), "sentinel")
    return found


PARTS: dict[str, tuple[Path, Callable[[], str]]] = {
    "modules": (ROOT / "ARCHITECTURE.md", module_map),
    "commands": (ROOT / "README.md", commands),
    "exit codes": (ROOT / "README.md", exit_codes),
    "metrics": (ROOT / "deploy" / "METRICS.md", metrics),
    "rules": (ROOT / "RULES.md", rules),
}


def renewed(name: str) -> tuple[Path, str, str]:
    """The document of one part, its text as it is, and as it should be."""
    path, make = PARTS[name]
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{path.name} has no part for {name}")
    return path, text, pattern.sub(lambda m: f"{m[1]}{make()}{m[2]}", text)


def main() -> int:
    """Renew or check every part."""
    check = "--check" in sys.argv[1:]
    stale = 0
    for name in PARTS:
        path, old, new = renewed(name)
        if old == new:
            continue
        stale += 1
        if not check:
            path.write_text(new, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {name} {'is out of date: run scripts/docs.py' if check else 'renewed'}")
    return 1 if check and stale else 0


def _modules() -> list[Path]:
    found = [*ROOT.glob("sentinel/**/*.py"), *ROOT.glob("agents/**/*.py")]
    return [p for p in found if p.read_text(encoding="utf-8").strip()]


def _first_sentence(path: Path) -> str:
    documented = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = documented.split("\n\n")[0].replace("\n", " ")
    return first.replace("``", "`")


if __name__ == "__main__":
    sys.exit(main())
