"""The command tree: fast, without torch, plain help, a version, and a doctor that tells the truth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import story

import sentinel as package
from sentinel.cli import checks
from sentinel.cli.checks import Health, ipc_check, torch_check
from sentinel.launch.injection import site_directory

Command = Callable[..., Any]


def child(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``sentinel`` as its own process."""
    command = [sys.executable, "-m", "sentinel.cli.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **variables})


@pytest.mark.parametrize("words", ["version", "incidents ls", "incidents show a0", "dump ls", "status", "--help"])
def test_commands_never_import_torch(run_dir: Path, words: str) -> None:
    """No command but run (and the doctor's child) imports torch, nor the agent."""
    words_in = words.split()
    if words_in[0] not in ("version", "--help"):
        words_in += ["--run-dir", str(run_dir)]
    program = (
        "import sys\nfrom sentinel.cli.main import main\n"
        f"try:\n    main({words_in!r})\nexcept SystemExit: pass\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'sentinel_agent'}), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stderr.splitlines()[-1] == "[]"
    assert ran.stdout


def test_version_prints_ours(sentinel: Command) -> None:
    """``version`` prints Sentinel's own version, in JSON with those of its packages."""
    assert sentinel("version").out.startswith(f"sentinel {package.__version__} (protocol 2)")
    printed = json.loads(sentinel("version", "-o", "json").out)
    assert printed["sentinel"] == package.__version__
    assert printed["pyzmq"]


def test_help_is_plain(sentinel: Command) -> None:
    """Help has no boxes and no escape sequences, names every command group and the exit codes."""
    ran = sentinel("--help")
    assert ran.code == 0
    assert not set(ran.out) & set("╭│╰─\x1b")
    for word in (
        "incidents",
        "dump",
        "status",
        "coordinator",
        "doctor",
        "version",
        "sentinel run",
        "3 incidents found",
    ):
        assert word in ran.out


def test_no_colour_where_none_is_wanted(run_dir: Path) -> None:
    """With NO_COLOR, and into a pipe, nothing holds an escape sequence."""
    ran = child("incidents", "ls", "--run-dir", run_dir, NO_COLOR="1", FORCE_COLOR="1")
    assert ran.returncode == 3
    assert "\x1b" not in ran.stdout + ran.stderr


def test_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    """``sentinel incidents export | head -1`` ends without a traceback or a complaint."""
    many = [story.incident(id=f"a0-r{n:06d}-01") for n in range(400)]
    directory = story.write_database(tmp_path / "run", *many)
    writing = subprocess.Popen(
        [sys.executable, "-m", "sentinel.cli.main", "incidents", "export", "--run-dir", str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert writing.stdout
    assert writing.stderr
    assert writing.stdout.readline() == b"{\n"
    writing.stdout.close()
    assert writing.stderr.read() == b""
    writing.stderr.close()
    assert writing.wait(30) == 0


def test_doctor_finds_this_environment_well(sentinel: Command) -> None:
    """In the test environment every check passes, and the injection check really ran our sitecustomize in a child."""
    printed = json.loads(sentinel("doctor", "-o", "json").out)
    health = {check["name"]: check["health"] for check in printed["checks"]}
    assert health.pop("open files") in ("ok", "warning")
    assert set(health.values()) == {"ok"}, printed
    assert set(health) >= {"python", "zeromq curve", "packages", "ipc path", "loopback port", "torch", "injection"}


def test_a_hidden_sitecustomize_does_not_confuse_the_doctor(tmp_path: Path) -> None:
    """A distribution's own sitecustomize is run after ours, and injection is still seen to work."""
    (tmp_path / "sitecustomize.py").write_text("ran = True\n")
    probe = {"site": str(site_directory())}
    path = f"{site_directory()}{os.pathsep}{tmp_path}"
    assert checks._child(checks._INJECTED, {"PYTHONPATH": path}) == probe["site"]
    assert checks._child(checks._INJECTED, {"PYTHONPATH": str(tmp_path)}) == str(tmp_path / "sitecustomize.py")
    assert checks.injection_check(probe).health == "ok"


def test_doctor_names_a_path_that_is_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A temporary directory whose sockets' paths the kernel refuses is found, with what to do."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / ("x" * 100)))
    result = ipc_check()
    assert result.health is Health.FAILED
    assert "TMPDIR" in result.hint


def test_doctor_says_how_to_get_torch() -> None:
    """Where torch does not import, the check fails with the error and the command that installs it."""
    result = torch_check({"error": "ModuleNotFoundError: No module named 'torch'"})
    assert (result.health, result.seen) == (Health.FAILED, "ModuleNotFoundError: No module named 'torch'")
    assert "pip install" in result.hint


def test_doctor_fails_without_torch(tmp_path: Path) -> None:
    """With a torch that cannot be imported, doctor exits 1 and still prints its whole table."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    ran = child("doctor", PYTHONPATH=str(tmp_path))
    assert ran.returncode == 1
    assert "ImportError: no torch here" in ran.stdout
    assert "zeromq curve" in ran.stdout
