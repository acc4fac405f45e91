"""The interpreter that need not import torch: what it runs is a process like any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from loading import load_script

SECONDS = 30.0


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where a test puts its program."""
    return tmp_path / "program.py"


def run(python: str, *words: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run something to its end."""
    command = [python, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, **options)  # type: ignore[call-overload, no-any-return]


def test_a_program_has_its_own_place_and_words(warm_python: str, script: Path) -> None:
    """Arguments, environment, directory, streams and ``__main__`` are the program's own, and torch is there already."""
    script.write_text(
        "import os, sys\n"
        "print(__name__, sys.argv, os.environ['MARK'], os.getcwd(), 'torch' in sys.modules, sys.stdin.read())\n"
        "print(sorted(set(os.environ) - {'MARK', 'LC_CTYPE'}), file=sys.stderr)\n"
    )
    ran = run(warm_python, "-u", script, "--flag", env={"MARK": "blue"}, cwd=script.parent, input="given")
    assert ran.stdout == f"__main__ ['{script}', '--flag'] blue {script.parent} True given\n"
    assert ran.stderr == "[]\n"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(7)", 7),
        ("raise SystemExit('why')", 1),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
    ],
)
def test_its_end_is_passed_on(warm_python: str, script: Path, program: str, code: int) -> None:
    """Exit codes and signals reach whoever waits, as from the interpreter itself."""
    script.write_text(program)
    assert run(warm_python, script).returncode == run(sys.executable, script).returncode == code


def test_a_site_of_its_own_is_run(warm_python: str, script: Path) -> None:
    """The first ``sitecustomize`` on PYTHONPATH runs before the program, as an injected agent needs it."""
    (script.parent / "sitecustomize.py").write_text("print('site')")
    script.write_text("print('program')")
    assert run(warm_python, script, env={"PYTHONPATH": str(script.parent)}).stdout == "site\nprogram\n"


@pytest.fixture
def sleeping(warm_python: str, script: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A program that sleeps, with its process id; it ends with 3 when asked to terminate."""
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([warm_python, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process, int(process.stdout.readline())
        process.kill()


def test_signals_reach_it(sleeping: tuple[subprocess.Popen[str], int]) -> None:
    """What terminates the executable terminates the program, which may end in its own way."""
    process, _ = sleeping
    process.terminate()
    assert process.wait(SECONDS) == 3


def test_it_does_not_outlive_its_executable(sleeping: tuple[subprocess.Popen[str], int]) -> None:
    """A killed executable leaves no program behind."""
    process, pid = sleeping
    process.kill()
    until = time.monotonic() + SECONDS
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_cannot_start_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the process that imports torch dies, that is one error and no endless wait."""
    warm = load_script("benchmarks/warm")
    monkeypatch.setattr(warm, "__file__", str(tmp_path / "missing.py"))
    with pytest.raises(OSError, match="did not come up"):
        warm.Warm()
