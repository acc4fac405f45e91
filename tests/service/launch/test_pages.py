"""The report that a run leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import story

from sentinel.launch import pages
from sentinel.launch.pages import ReportFailed, write_report


def test_report_is_written_into_the_run_directory(tmp_path: Path) -> None:
    """The page tells of the run's incidents."""
    run_dir = story.write_database(tmp_path / "run", story.incident())
    story.write_bundle(run_dir)
    page = write_report(run_dir, story.RUN, [story.incident()])
    assert page == run_dir / "report.html"
    assert "At step 7" in page.read_text()


def test_report_fails_in_one_line(tmp_path: Path) -> None:
    """No database, a folder that is gone, or a fault in drawing is one error with one line."""
    with pytest.raises(ReportFailed) as failed:
        write_report(tmp_path / "gone", story.RUN, [story.incident()])
    assert "\n" not in str(failed.value)


def test_fault_in_drawing_never_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a hostile bundle does to the drawing, the launcher gets the one error it knows."""
    run_dir = story.write_database(tmp_path / "run", story.incident())
    for error in (KeyError("x"), ZeroDivisionError(), TypeError("x"), RecursionError()):

        def fail(*_: object, error: Exception = error) -> str:
            raise error

        monkeypatch.setattr(pages, "render", fail)
        with pytest.raises(ReportFailed):
            write_report(run_dir, story.RUN, [story.incident()])


def test_long_logs_are_read_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user waits for the exit code: past its time the report goes without the rest of the log."""
    run_dir = story.write_database(tmp_path / "run", story.incident())
    monkeypatch.setattr(pages, "READ_SECONDS", -1.0)
    assert write_report(run_dir, story.RUN, [story.incident()]).exists()
