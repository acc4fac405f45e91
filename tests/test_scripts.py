"""The scripts a stranger starts with: what they say on a machine that lacks something, and that the second run is free."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from loading import load_script

ROOT = Path(__file__).parents[1]
demo_check = load_script("demo_check")
# What a minimal Debian has; python and apt-get are added, or not, by each test.
TOOLS = (
    "bash",
    "cat",
    "cp",
    "cut",
    "dirname",
    "env",
    "grep",
    "head",
    "id",
    "mkdir",
    "mktemp",
    "rm",
    "sha256sum",
    "tail",
    "tee",
)

# Stands in for Python: makes "environments" that hold itself, and writes down every call of pip.
PYTHON = """
case "$*" in
  *sys.version_info*) exit "${OLD:-0}" ;;
  *ensurepip*) exit "${NO_ENSUREPIP:-0}" ;;
  "-m venv --clear "*)
    place=${@: -1}/bin
    mkdir -p "$place" && cp "$0" "$place/python" && echo "#!$place/python" >"$place/pip"
    echo made >>"$HOME/venv.log" ;;
  "-c import urllib"*) exit 1 ;;
  "-m pip --version") [[ $0 == */.venv/bin/python ]] ;;
  "-m pip install"*) echo "$*" >>"$HOME/pip.log"; [ -z "${PIP_FAILS:-}" ] || { echo "ERROR: no network"; exit 1; } ;;
  "-m pytest"*) echo "ran pytest $*" ;;
esac
"""


class Machine:
    """A copy of the checkout's scripts, and a PATH that holds only what the test puts there."""

    def __init__(self, place: Path) -> None:
        self.root = place / "checkout"
        self.bin = place / "bin"
        self.bin.mkdir()
        (self.root / "tests").mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self.bin / tool).symlink_to(found)

    def add(self, name: str, script: str) -> None:
        """A program on the PATH."""
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def run(self, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """One of the scripts, without a terminal."""
        return subprocess.run(
            [self.root / "scripts" / script, *words],
            env={"PATH": str(self.bin), "HOME": str(self.root), **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def pip_calls(self) -> list[str]:
        """Every call of pip so far."""
        log = self.root / "pip.log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with bash and coreutils only."""
    return Machine(tmp_path)


@pytest.mark.parametrize("script", ["test", "demo", "lint"])
def test_machine_without_python_is_told(machine: Machine, script: str) -> None:
    """Without a Python that is new enough each script ends with one line and a hint, also if there is an old one."""
    machine.add("python3", PYTHON)
    ran = machine.run(script, OLD="1")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.splitlines()[0] == "sentinel: error: no Python 3.11 or newer on PATH"
    assert ran.stderr.splitlines()[1].startswith("hint: ")


def test_python_without_ensurepip_is_told(machine: Machine) -> None:
    """On a Debian without python3-venv the line names the package to install."""
    machine.add("python3.11", PYTHON)
    ran = machine.run("test", NO_ENSUREPIP="1")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-2:] == [
        "sentinel: error: this Python cannot make virtual environments (ensurepip is absent)",
        "hint: as root: apt-get install python3-venv",
    ]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may install system packages")
def test_root_gets_python_venv_installed(machine: Machine) -> None:
    """As root with apt-get the missing package is installed, and said so."""
    machine.add("python3.11", PYTHON.replace('"${NO_ENSUREPIP:-0}"', '$([ -e "$HOME/venv-package" ]; echo $?)'))
    machine.add("apt-get", 'case "$*" in *python3-venv*) : >"$HOME/venv-package" ;; esac')
    ran = machine.run("test")
    assert ran.returncode == 0, ran.stderr
    assert "installing system packages with apt-get: python3-venv" in ran.stderr


def test_second_run_installs_nothing(machine: Machine) -> None:
    """The first run installs torch and the project, the second nothing; a changed pyproject.toml installs again."""
    machine.add("python3.11", PYTHON)
    first = machine.run("test", "-q")
    assert first.returncode == 0, first.stderr
    assert "ran pytest -m pytest -m not gpu tests/service" in first.stdout
    assert len(machine.pip_calls) == 2
    assert "torch==" in machine.pip_calls[0]
    assert machine.pip_calls[1].endswith("-e .[dev]")
    assert machine.run("test").returncode == 0
    assert len(machine.pip_calls) == 2
    with (machine.root / "pyproject.toml").open("a") as project:
        project.write("\n# changed\n")
    assert machine.run("test").returncode == 0
    assert len(machine.pip_calls) == 4


def test_checkout_that_was_moved_gets_a_new_environment(machine: Machine) -> None:
    """Commands in .venv name its place, so a checkout that was moved makes .venv again; one that stays does not."""
    machine.add("python3.11", PYTHON)
    assert machine.run("test").returncode == 0
    with (machine.root / "pyproject.toml").open("a") as project:
        project.write("\n# changed\n")
    assert machine.run("test").returncode == 0
    assert (machine.root / "venv.log").read_text() == "made\n"
    machine.root = machine.root.rename(machine.root.with_name("moved"))
    assert machine.run("test").returncode == 0
    assert (machine.root / "venv.log").read_text() == "made\nmade\n"


def test_failed_install_is_told_and_tried_again(machine: Machine) -> None:
    """If pip fails, its error, one line and a hint are shown, and the next run tries again."""
    machine.add("python3.11", PYTHON)
    failed = machine.run("test", PIP_FAILS="1")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-3:] == [
        "ERROR: no network",
        "sentinel: error: could not install the Python packages",
        "hint: is there a network? the whole log is .venv/install.log",
    ]
    assert machine.run("test").returncode == 0


def test_environment_active_elsewhere_does_not_matter(machine: Machine, tmp_path: Path) -> None:
    """VIRTUAL_ENV, PYTHONPATH and PYTHONHOME of the caller do not reach the tests."""
    machine.add(
        "python3.11", PYTHON.replace('echo "ran pytest $*"', 'echo "${VIRTUAL_ENV-}${PYTHONPATH-}${PYTHONHOME-}."')
    )
    ran = machine.run("test", VIRTUAL_ENV="/elsewhere", PYTHONPATH=str(tmp_path), PYTHONHOME="/nowhere")
    assert set(ran.stdout.split()) == {"."}


def test_paths_given_replace_the_default_ones(machine: Machine) -> None:
    """``scripts/test PATH::NAME`` runs that alone, options alone keep the default paths, and the exit code is pytest's."""
    machine.add("python3.11", PYTHON.replace('echo "ran pytest $*"', 'echo "$*"; exit 5'))
    (machine.root / "tests" / "test_one.py").touch()
    ran = machine.run("test", "tests/test_one.py::test_x", "-x")
    assert (ran.returncode, ran.stdout) == (5, "-m pytest -m not gpu tests/test_one.py::test_x -x\n")
    assert "tests/e2e" in machine.run("test", "-x").stdout


def test_demo_check_knows_right_from_wrong() -> None:
    """The demo's own check accepts what each scene should show and refuses everything else."""
    right = {"segmentation": [1], "overflow": []}
    for scene, ranks in right.items():
        expected = dict(demo_check.EXPECTED[scene] or {}, bundle="bundles/x")
        assert expected["suspect_ranks"] == ranks
        assert demo_check.check(scene, [expected]) == ""
        assert "saw" in demo_check.check(scene, [{**expected, "step": 8}])
        assert demo_check.check(scene, []) == "0 incidents where there should be one"
        assert demo_check.check(scene, [{**expected, "bundle": None}]) == "no bundle was kept"
    assert demo_check.check("healthy", []) == ""
    assert demo_check.check("healthy", [{}]) == "1 incident(s) where there should be none"


def test_every_benchmark_that_is_offered_is_there() -> None:
    """Each word of ``scripts/bench`` names a file that says what it measures; the list in its usage is the one it takes."""
    text = (ROOT / "scripts" / "bench").read_text()
    offered = re.findall(r"^  ([a-z |]+)\) exec", text, re.MULTILINE)[0].split(" | ")
    assert text.count("|".join(offered)) == 2
    for name in offered:
        module = ast.parse((ROOT / "scripts" / "benchmarks" / f"{name}.py").read_text())
        assert ast.get_docstring(module)
