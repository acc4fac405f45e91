"""``sentinel dump``: what a bundle holds, whether it is what was committed, and partial or hostile ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import story

Command = Callable[..., Any]


def test_list_shows_complete_and_partial(sentinel: Command, tmp_path: Path) -> None:
    """``ls`` names each bundle with its step, its state and its incidents."""
    story.write_bundle(tmp_path / "whole")
    story.write_bundle(tmp_path / "half", ranks=(1,))
    whole = sentinel("dump", "ls", "--run-dir", tmp_path / "whole").out.splitlines()[1].split()
    assert whole == [story.BUNDLE, "7", "complete", "2", "of", "2", story.incident().id]
    half = sentinel("dump", "ls", "--run-dir", tmp_path / "half", "-o", "json").out
    assert json.loads(half)["bundles"][0]["missing_ranks"] == [0]


def test_list_without_bundles_is_no_error(sentinel: Command, healthy_dir: Path) -> None:
    """A healthy run has no bundles: a line on stderr, exit 0."""
    ran = sentinel("dump", "ls", "--run-dir", healthy_dir)
    assert (ran.code, ran.out, ran.err) == (0, "", f"no bundles in {healthy_dir}\n")


def test_show_names_sample_and_statistics(sentinel: Command, run_dir: Path) -> None:
    """``show`` says which sample is odd, shows the ranks with something odd in full, and how to see another."""
    ran = sentinel("dump", "show", run_dir / "bundles" / story.BUNDLE)
    assert ran.code == 0
    assert "sample 5 (data set index 235) of the DataLoader's batch, tensor image is constant" in ran.out
    assert "Rank 1: nonfinite gradient; parameters as they were before the step" in ran.out
    assert "Rank 0:" not in ran.out
    assert "--rank N" in ran.out
    assert "head.2.bias" in ran.out


def test_show_takes_the_manifest_and_one_rank(sentinel: Command, run_dir: Path) -> None:
    """``show`` also takes the manifest's path, and ``--rank`` leaves the other ranks' pages out."""
    ran = sentinel("dump", "show", run_dir / "bundles" / story.BUNDLE / "manifest.json", "--rank", "1")
    assert "Rank 1:" in ran.out
    assert "Rank 0:" not in ran.out
    absent = sentinel("dump", "show", run_dir / "bundles" / story.BUNDLE, "--rank", "5")
    assert (absent.code, absent.out) == (1, "")


def test_show_as_json_holds_every_part(sentinel: Command, run_dir: Path) -> None:
    """``show -o json`` holds manifest and part headers, NaN as a string."""
    printed = json.loads(sentinel("dump", "show", run_dir / "bundles" / story.BUNDLE, "-o", "json").out)
    assert printed["manifest"]["complete"] is True
    assert [part["rank"] for part in printed["parts"]] == [0, 1]
    assert printed["parts"][1]["loss"] == "NaN"


def test_verify_accepts_what_was_committed(sentinel: Command, run_dir: Path) -> None:
    """An untouched bundle verifies."""
    ran = sentinel("dump", "verify", run_dir / "bundles" / story.BUNDLE)
    assert (ran.code, ran.out) == (0, f"bundle {story.BUNDLE}: complete, 4 files as committed\n")


@pytest.mark.parametrize("output", ["table", "json"])
def test_verify_finds_a_changed_byte(sentinel: Command, run_dir: Path, output: str) -> None:
    """One changed byte is named, and the exit code is 1."""
    tensors = run_dir / "bundles" / story.BUNDLE / "rank-00001" / "batches.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    ran = sentinel("dump", "verify", run_dir / "bundles" / story.BUNDLE, "-o", output)
    assert ran.code == 1
    assert "rank-00001/batches.safetensors" in ran.out
    assert "sha256" in ran.out


def test_partial_bundles_exit_six_and_are_still_shown(sentinel: Command, tmp_path: Path) -> None:
    """A bundle without one rank's part is shown and verified as far as it goes; exit code 6 and a line say so."""
    bundle = story.write_bundle(tmp_path / "run", ranks=(1,))
    for verb in ("show", "verify"):
        ran = sentinel("dump", verb, bundle)
        assert ran.code == 6
        assert ran.err.startswith(
            f"sentinel: error: bundle {story.BUNDLE} is partial: nothing whole from rank 0\nhint: "
        )
    assert "Rank 1:" in sentinel("dump", "show", bundle).out


def test_bundle_that_was_never_committed_is_partial(sentinel: Command, tmp_path: Path) -> None:
    """Parts without a manifest are a partial bundle."""
    part = story.write_part(tmp_path / "run", story.header(1))
    ran = sentinel("dump", "show", part.parent)
    assert ran.code == 6
    assert "sample 5" in ran.out


@pytest.mark.parametrize(("name", "code"), [("nowhere", 1), ("empty", 5), ("hostile", 5)])
def test_what_is_no_bundle_is_refused_in_one_line(sentinel: Command, tmp_path: Path, name: str, code: int) -> None:
    """A missing path, an empty directory, and a part.json that is a symlink to elsewhere each end in one line."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "hostile" / "rank-00000").mkdir(parents=True)
    (tmp_path / "hostile" / "rank-00000" / "part.json").symlink_to("/etc/hostname")
    ran = sentinel("dump", "show", tmp_path / name)
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (code, "", 2)


def test_damaged_part_of_a_committed_bundle_is_refused(sentinel: Command, run_dir: Path) -> None:
    """A part.json that is no JSON any more is refused with exit code 5 and a pointer to verify."""
    (run_dir / "bundles" / story.BUNDLE / "rank-00001" / "part.json").write_text("{")
    ran = sentinel("dump", "show", run_dir / "bundles" / story.BUNDLE)
    assert (ran.code, ran.out) == (5, "")
    assert "dump verify" in ran.err


def test_names_cannot_drive_the_terminal(sentinel: Command, tmp_path: Path) -> None:
    """Escape sequences in a run id, a reason or a tensor's name reach neither the page nor the tables."""
    escape = "\x1b]0;owned\x07"
    gradient = story.header(1).gradient_statistics[0].model_copy(update={"name": escape})
    part = story.header(1, reason=escape, gradient_statistics=(gradient,))
    page = sentinel("dump", "show", story.write_part(tmp_path / "run", part).parent)
    hostile = story.incident(reason=escape, parameters=(escape,), id=f"a0{escape}")
    directory = story.write_database(tmp_path / "run", hostile)
    shown = sentinel("incidents", "show", "a0", "--run-dir", directory)
    listed = sentinel("incidents", "ls", "--run-dir", directory)
    assert "\x1b" not in page.out + page.err + shown.out + listed.out
    assert "owned" in page.out
    assert "owned" in shown.out
