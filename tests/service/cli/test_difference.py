"""`sentinel dump diff` and `sentinel incidents show --timeline`, as they are typed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import story

from sentinel.wire.names import BUNDLES

Command = Callable[..., Any]


def test_two_ranks_of_a_bundle(sentinel: Command, run_dir: Path) -> None:
    """A rank is named by its directory inside the bundle."""
    bundle = run_dir / BUNDLES / story.BUNDLE
    ran = sentinel("dump", "diff", bundle / "rank-00000", bundle / "rank-00001")
    assert ran.code == 0
    assert "rank-00001" in ran.out
    assert "Every tensor is in both" in ran.out


def test_two_bundles_rank_by_rank(sentinel: Command, run_dir: Path, tmp_path: Path) -> None:
    """Two bundles are compared for every rank that both have; the JSON has one entry for each."""
    bundle, other = run_dir / BUNDLES / story.BUNDLE, tmp_path / "other"
    shutil.copytree(bundle, other)
    ran = sentinel("dump", "diff", bundle, other, "-o", "json")
    record = json.loads(ran.out)
    assert record["schema_version"] == 1
    assert [part["a"][-1] for part in record["parts"]] == ["0", "1"]


def test_rank_against_bundle_is_a_usage_error(sentinel: Command, run_dir: Path) -> None:
    """A rank cannot be compared with a whole bundle; the hint says what can."""
    bundle = run_dir / BUNDLES / story.BUNDLE
    ran = sentinel("dump", "diff", bundle / "rank-00000", bundle)
    assert ran.code == 2
    assert "name a rank of both, or of neither" in ran.err


def test_rank_that_is_not_there_is_one_line(sentinel: Command, run_dir: Path) -> None:
    """A missing part is said in a line with an exit code of its own."""
    bundle = run_dir / BUNDLES / story.BUNDLE
    ran = sentinel("dump", "diff", bundle / "rank-00000", bundle / "rank-00009")
    assert ran.code == 5
    assert "has no part of rank 9" in ran.err


def test_timeline_is_read_from_the_run_directory(sentinel: Command, run_dir: Path) -> None:
    """The incident's opening is told, as a table and as JSON."""
    shown = sentinel("incidents", "show", "a0-r", "--run-dir", run_dir, "--timeline")
    assert shown.code == 0
    assert "incident a0-r000007-01 opened: nonfinite_gradient" in shown.out
    record = json.loads(sentinel("incidents", "show", "a0-r", "--run-dir", run_dir, "--timeline", "-o", "json").out)
    assert record["incident"] == "a0-r000007-01"
    assert record["moments"]
