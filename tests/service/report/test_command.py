"""`sentinel report`: what its argument may be, and where the result goes."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest
import story

from sentinel.cli.main import main


def report(*words: str | Path) -> int:
    """Exit code of ``sentinel report``."""
    with pytest.raises(SystemExit) as left:
        main(["report", *(str(word) for word in words)])
    return int(left.value.code or 0)


def test_incident_becomes_a_page(run_dir: Path, tmp_path: Path) -> None:
    """An incident's id, or its beginning, and a file that ends in .html give a page only this user can read."""
    page = tmp_path / "report.html"
    assert report("a0-r", "--run-dir", run_dir, "-o", page) == 0
    assert "At step 7" in page.read_text()
    assert stat.S_IMODE(page.stat().st_mode) == 0o600


def test_bundle_finds_its_incident(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bundle below its run directory is reported with the incident it belongs to."""
    assert report(run_dir / "bundles" / story.BUNDLE, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["reports"][0]["incident"]["id"] == story.incident().id


def test_bundle_elsewhere_is_reported_alone(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bundle that was copied away still has a report."""
    copied = tmp_path / "copied"
    shutil.copytree(run_dir / "bundles" / story.BUNDLE, copied)
    assert report(copied, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["reports"][0]["incident"] is None


def test_run_is_reported_as_text(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an argument the whole run is reported; without a file as text on stdout."""
    assert report("--run-dir", run_dir) == 0
    out = capsys.readouterr().out
    assert "At step 7" in out
    assert "first bad op" in out
    assert "\nNext\n" in out


def test_unknown_incident_is_one_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An id that is not there is an error with a hint."""
    assert report("a9-r", "--run-dir", run_dir) == 1
    assert "sentinel: error: no incident a9-r" in capsys.readouterr().err


def test_file_that_cannot_be_written_is_one_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that does not exist is named, with a hint."""
    assert report("--run-dir", run_dir, "-o", run_dir / "no" / "r.html") == 1
    assert "cannot write" in capsys.readouterr().err


def test_directory_that_is_no_bundle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory without manifest and parts is refused in a line."""
    assert report(tmp_path) == 5
    assert "is not a bundle" in capsys.readouterr().err
