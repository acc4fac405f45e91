"""What the wheel holds: exactly two import packages, and nothing that another distribution owns."""

from __future__ import annotations

import os
import tomllib
import zipfile
from pathlib import Path

import pytest

from sentinel import __version__

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout by the build backend itself: no network, no isolated environment."""
    from hatchling import build

    place = tmp_path_factory.mktemp("wheel")
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        return place / build.build_wheel(str(place))
    finally:
        os.chdir(before)


def test_wheel_has_exactly_our_names(wheel: Path) -> None:
    """The wheel's top-level names are sentinel, sentinel_agent and its own metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
    assert names == {"sentinel", "sentinel_agent", f"nan_sentinel-{__version__}.dist-info"}


def test_wheel_is_whole(wheel: Path) -> None:
    """Every Python file of the two packages, and the marker of typed packages, is in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    ours = [p.relative_to(ROOT) for p in ROOT.glob("sentinel/**/*.py")]
    ours += [p.relative_to(ROOT / "agents") for p in ROOT.glob("agents/sentinel_agent/**/*.py")]
    assert {str(path) for path in ours} <= names
    assert {"sentinel/py.typed", "sentinel_agent/py.typed"} <= names


def test_wheel_never_forces_torch(wheel: Path) -> None:
    """torch is asked for by the extra [torch] only, so that installing us cannot replace a cluster's own build."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"nan_sentinel-{__version__}.dist-info/METADATA").decode()
    asked = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: torch")]
    assert asked
    assert all("extra == 'torch'" in line for line in asked)


def test_command_is_declared(wheel: Path) -> None:
    """The wheel installs one command, ``sentinel``."""
    with zipfile.ZipFile(wheel) as archive:
        declared = archive.read(f"nan_sentinel-{__version__}.dist-info/entry_points.txt").decode()
    assert declared.split() == ["[console_scripts]", "sentinel", "=", "sentinel.cli.main:main"]


def test_direct_dependencies_are_declared() -> None:
    """Each third-party package that the service imports is a declared dependency."""
    import ast

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    known = {d.split(">")[0].replace("-", "_").lower() for d in declared} | {
        "zmq",
        "sentinel",
        "sentinel_agent",
        "torch",
    }
    import sys

    for path in [*ROOT.glob("sentinel/**/*.py"), *ROOT.glob("agents/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            for top in {m.split(".")[0] for m in modules}:
                assert top in known or top in sys.stdlib_module_names, f"{path.relative_to(ROOT)} imports {top}"
