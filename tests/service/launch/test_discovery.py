"""Target files: what a Prometheus reads of a run, where, and for how long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sentinel.launch.discovery import TARGETS_FILE, announce


def test_a_run_is_a_target_while_it_goes_on(tmp_path: Path) -> None:
    """Both files name the pages' host and port in file_sd's form, and both are gone with the run."""
    run_dir, targets = tmp_path / "run", tmp_path / "targets"
    run_dir.mkdir()
    targets.mkdir()
    announcement = announce("http://127.0.0.1:4321", "nightly-7", run_dir, targets)
    for path in (run_dir / TARGETS_FILE, targets / "nightly-7.json"):
        assert json.loads(path.read_text()) == [{"targets": ["127.0.0.1:4321"]}]
        assert path.stat().st_mode & 0o777 == 0o644
    announcement.withdraw()
    assert not [*run_dir.iterdir(), *targets.iterdir()]
    announcement.withdraw()


@pytest.mark.parametrize("run_id", ["../../etc/passwd", "a/b", "\ud800", "", "x" * 300, "<script>"])
def test_any_run_id_is_one_file_in_the_folder(run_id: str, tmp_path: Path) -> None:
    """No id leads out of the folder, and ids that look alike get files of their own."""
    targets = tmp_path / "targets"
    targets.mkdir()
    announce("http://[::1]:1", run_id, tmp_path, targets)
    announce("http://[::1]:2", f"{run_id}!", tmp_path, targets)
    assert len([path for path in targets.iterdir() if path.suffix == ".json"]) == 2


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    """The caller hears of it and goes on without."""
    with pytest.raises(FileNotFoundError):
        announce("http://127.0.0.1:1", "r", tmp_path, tmp_path / "absent")
