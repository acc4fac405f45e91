"""What is written down is held true: module map, commands, exit codes, metrics, runbook, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loading import load_script

from sentinel.cli.output import EXIT_CODE_WORDS, ExitCode
from sentinel.incidents.model import Kind

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("deploy/*.md")])


docs = load_script("docs")


@pytest.mark.parametrize("part", sorted(docs.PARTS))
def test_generated_parts_are_current(part: str) -> None:
    """Every generated part of a document is what scripts/docs.py would write now."""
    path, old, new = docs.renewed(part)
    assert old == new, f"{path.name}: run scripts/docs.py"


def test_every_module_is_in_the_map() -> None:
    """ARCHITECTURE.md names every module of the product with what it owns."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in [*ROOT.glob("sentinel/**/*.py"), *ROOT.glob("agents/**/*.py")]:
        if path.read_text().strip():
            package = text.split(f"**{path.parent.relative_to(ROOT)}/**", 1)
            assert len(package) == 2, f"no package {path.parent.relative_to(ROOT)}"
            assert re.search(rf"^- `{re.escape(path.name)}`: \S", package[1].split("\n**", 1)[0], re.MULTILINE), path


def test_every_command_is_documented_and_has_help() -> None:
    """README.md lists every command, and each has a help text of one sentence."""
    text = (ROOT / "README.md").read_text()
    for command, help_ in docs.command_help().items():
        assert f"`{command}`" in text
        assert help_.endswith((".", "…")), command
    assert "`sentinel run`" in text


def test_every_option_has_help() -> None:
    """No option or argument of a command is without an explanation."""
    import typer.main

    from sentinel.cli.app import app

    silent: list[str] = []

    def visit(command: object, name: str) -> None:
        for child, inner in getattr(command, "commands", {}).items():
            visit(inner, f"{name} {child}")
        silent.extend(f"{name} {p.name}" for p in getattr(command, "params", []) if not getattr(p, "help", None))

    visit(typer.main.get_command(app), "sentinel")
    assert not silent


def test_exit_codes_are_documented() -> None:
    """README.md explains every exit code, and each code has its words."""
    text = (ROOT / "README.md").read_text()
    assert set(EXIT_CODE_WORDS) == set(ExitCode)
    for code in ExitCode:
        assert re.search(rf"^\| {int(code)} \| \w", text, re.MULTILINE), code


def test_every_metric_is_documented() -> None:
    """deploy/METRICS.md has a row with type and meaning for every metric in the coordinator's table."""
    from sentinel.coordinator.metric_table import METRICS

    text = (ROOT / "deploy" / "METRICS.md").read_text()
    for metric in METRICS:
        assert re.search(rf"^\| `{metric.name}\w*` \| {metric.type} \|.*\| \w.*\|$", text, re.MULTILINE), metric.name


def test_runbook_has_a_section_for_each_kind() -> None:
    """Each kind (and each alert) has a section with meaning, impact, diagnosis and what to do; none is of an unknown kind."""
    text = (ROOT / "deploy" / "RUNBOOK.md").read_text()
    sections = dict(zip(*[iter(re.split(r"^## (.+)\n", text, flags=re.MULTILINE)[1:])] * 2, strict=True))
    assert {name for name in sections if not name.startswith("Sentinel")} == {kind.value for kind in Kind}
    for kind, section in sections.items():
        for heading in ("**Meaning.** ", "**Impact.** ", "**Diagnosis.** ", "**What to do.** "):
            assert heading in section, f"{kind}: {heading}"


def test_runbook_says_which_kinds_are_raised() -> None:
    """A kind is marked as reserved exactly as long as no rule of the core raises it."""
    text = (ROOT / "deploy" / "RUNBOOK.md").read_text()
    core = [path for path in ROOT.glob("sentinel/incidents/*.py") if path.name != "model.py"]
    rules = "".join(path.read_text() for path in core)
    for kind in Kind:
        section = text.split(f"## {kind.value}\n", 1)[1].split("\n## ", 1)[0]
        raised = re.search(rf"\bKind\.{kind.name}\b", rules) is not None
        assert ("*Reserved.*" not in section) == raised, kind


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link of a document names a file that is there."""
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_documents_hold_no_leftovers(path: Path) -> None:
    """No document holds a note to its author."""
    assert not re.search(r"\b(TODO|FIXME|XXX|TBD|lorem)\b", path.read_text())


def test_changelog_has_this_version_or_unreleased() -> None:
    """CHANGELOG.md has a section for what is not released yet, or for the present version."""
    from sentinel import __version__

    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text or f"## [{__version__}]" in text
