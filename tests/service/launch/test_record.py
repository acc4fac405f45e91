"""``run.json`` and the run directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.launch.record import RunRecord, default_run_directory, make_run_directory, new_run_id, redacted, utc_now


def record() -> RunRecord:
    """A record as it is at the start."""
    return RunRecord(run_id="run-1", argv=("train.py",), versions={"torch": "2"}, started_at=utc_now())


def test_the_record_is_whole_and_private(tmp_path: Path) -> None:
    """run.json is valid JSON for its owner only, and is replaced, never half-written."""
    record().write(tmp_path)
    finished = record().model_copy(update={"exit_code": 1, "finished_at": utc_now()})
    finished.write(tmp_path)
    path = tmp_path / "run.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert RunRecord.model_validate_json(path.read_text()) == finished
    assert json.loads(path.read_text())["exit_code"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_run_directory_is_private(tmp_path: Path) -> None:
    """Bundles hold users' data: the directory is its owner's alone, and nothing of the writing test is left."""
    make_run_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "a" / "b").iterdir()) == []
    make_run_directory(tmp_path / "a" / "b")


def test_a_directory_that_cannot_be_written_is_noticed_at_once(tmp_path: Path) -> None:
    """A read-only place is an OSError before the job starts, not at the first incident."""
    script = (
        "import os, sys, pathlib\n"
        "from sentinel.launch.record import make_run_directory\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "os.getuid() == 0 and os.setuid(65534)\n"  # root could write anywhere
        "try: make_run_directory(place)\n"
        "except OSError as error: print(type(error).__name__)\n"
    )
    place = Path("/proc")  # nobody can write there
    done = subprocess.run(
        [sys.executable, "-c", script, str(place)], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() in (["PermissionError"], ["FileNotFoundError"])
    with pytest.raises(OSError, match="file"):
        make_run_directory(Path(__file__) / "below-a-file")


def test_run_ids_sort_by_time_and_differ() -> None:
    """Two runs of one second have different names, and the newer of two seconds sorts last."""
    now = utc_now()
    assert len({new_run_id(now) for _ in range(50)}) == 50
    assert new_run_id(now).startswith(f"{now:%Y%m%d-%H%M%S}-")


def test_the_default_place_is_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wish, a run is left below ./sentinel-runs, as an absolute path that survives a chdir of the script."""
    monkeypatch.chdir(tmp_path)
    assert default_run_directory("x") == Path(os.path.realpath(tmp_path)) / "sentinel-runs" / "x"


def test_secrets_on_the_command_line_are_not_recorded() -> None:
    """Values of words that look like secrets are left out of the record; the rest is kept as typed."""
    typed = [
        "--nproc-per-node",
        "2",
        "train.py",
        "--api-key",
        "abc",
        "--token=def",
        "--lr",
        "0.1",
        "--use-key-cache",
        "--x",
    ]
    assert redacted(typed) == (
        *(
            "--nproc-per-node",
            "2",
            "train.py",
            "--api-key",
            "***",
            "--token=***",
            "--lr",
            "0.1",
            "--use-key-cache",
            "--x",
        ),
    )
