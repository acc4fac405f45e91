"""The ``sentinel`` command's way to ``run``: what is imported, and how it fails before it begins."""

from __future__ import annotations

import re
import subprocess
import sys


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_run_never_imports_the_command_tree() -> None:
    """``sentinel run`` is torchrun's parser and ours: typer costs it nothing."""
    done = python(
        "import sys\nfrom sentinel.cli.main import main\ncode = main(['run', '--nope', 'x.py'])\n"
        "print(code, 'typer' in sys.modules, 'torch' in sys.modules)"
    )
    assert done.stdout.split() == ["2", "False", "True"], done.stderr


def test_without_torch_run_says_what_to_install() -> None:
    """On a machine without PyTorch ``run`` is one line and a hint, and exit 1."""
    done = python(
        "import sys\nsys.modules['torch'] = None\nfrom sentinel.cli.main import main\nsys.exit(main(['run', 'x.py']))"
    )
    assert done.returncode == 1
    assert re.fullmatch(r"sentinel: error: .*PyTorch.*\nhint: pip install torch\n", done.stderr)


def test_other_commands_never_import_torch() -> None:
    """Every command but ``run`` works where torch is not."""
    done = python(
        "import sys\nsys.modules['torch'] = None\nfrom sentinel.cli.main import main\nsys.exit(main(['version']))"
    )
    assert done.returncode == 0, done.stderr
