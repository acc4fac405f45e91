"""Running a command of the CLI as its user does, and looking at what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import story


@dataclass(frozen=True, slots=True)
class Ran:
    """Exit code and both streams of one command."""

    code: int
    out: str
    err: str


Command = Callable[..., Ran]


@pytest.fixture
def sentinel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """``sentinel(*words)`` in this process, in an empty directory and without SENTINEL_* variables."""
    from sentinel.cli.main import main

    monkeypatch.chdir(tmp_path)
    for name in ("SENTINEL_HTTP", "SENTINEL_HTTP_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str | Path) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            raise SystemExit(main([str(word) for word in words]))
        streams = capsys.readouterr()
        return Ran(int(left.value.code or 0), streams.out, streams.err)

    return run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with one incident and its whole bundle."""
    directory = story.write_database(tmp_path / "run", story.incident())
    story.write_bundle(directory)
    return directory


@pytest.fixture
def healthy_dir(tmp_path: Path) -> Path:
    """A run directory without incidents."""
    return story.write_database(tmp_path / "healthy")
