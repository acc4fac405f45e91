"""What `sentinel lint` prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.cli.main import main
from sentinel.postmortem.lint.registry import RULES

BAD = "import torch\ny = x / x.std()\nz = x / x.std()\n"


def lint(*words: str) -> int:
    """Exit code of ``sentinel lint``."""
    with pytest.raises(SystemExit) as left:
        main(["lint", *words])
    return int(left.value.code or 0)


@pytest.fixture
def train(tmp_path: Path) -> str:
    """A script with the same fault twice."""
    path = tmp_path / "train.py"
    path.write_text(BAD)
    return str(path)


def test_text_names_place_reason_and_repair(train: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each finding has its place on one line; the rule is explained once; the exit code is 3."""
    assert lint(train) == 3
    out = capsys.readouterr().out
    assert f"{train}:2:5: division_by_std: " in out
    assert f"{train}:3:5: division_by_std: " in out
    assert out.count("    why  ") == out.count("    fix  ") == 1
    assert "see  deploy/LINT.md#division_by_std" in out


def test_json_is_for_programs(train: str, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON carries a schema version and every field of a finding, and nothing else is on stdout."""
    assert lint(train, "--format", "json") == 3
    record = json.loads(capsys.readouterr().out)
    assert record["schema_version"] == 1
    assert {f["line"] for f in record["findings"]} == {2, 3}
    assert set(record["findings"][0]) == {"rule", "path", "line", "column", "end_line", "message", "why", "fix", "page"}


def test_clean_code_ends_with_zero(train: str) -> None:
    """Nothing found is exit code 0; so is a file whose only rule is ignored."""
    assert lint(train, "--ignore", "division_by_std") == 0
    assert lint(train, "--select", "p_log_p,sqrt_without_eps") == 0


def test_unknown_rule_is_a_usage_error(train: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt rule is named on one line, with the rules that there are."""
    assert lint(train, "--select", "division_by_zero") == 2
    assert "sentinel: error: no rule division_by_zero" in capsys.readouterr().err


def test_unreadable_file_fails_without_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there is exit code 1 and one line."""
    assert lint(str(tmp_path / "absent.py")) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_no_file_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file there is a hint how to name one."""
    assert lint() == 2
    assert "hint: sentinel lint train.py" in capsys.readouterr().err


def test_explain_prints_rules(capsys: pytest.CaptureFixture[str]) -> None:
    """--explain prints one rule with its reason, or all of them."""
    assert lint("--explain", "p_log_p") == 0
    assert "0 * -inf" in capsys.readouterr().out
    assert lint("--explain", "all") == 0
    out = capsys.readouterr().out
    assert all(f"{rule}\n" in out for rule in RULES)


def test_lint_needs_no_torch(train: str) -> None:
    """Linting imports no torch: it runs in an editor and in a commit hook."""
    code = f"import sys; from sentinel.cli.main import main\ntry: main(['lint', {train!r}])\nexcept SystemExit: pass\n"
    code += "print({'torch', 'zmq'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines()[-1] == "set()", ran.stderr
