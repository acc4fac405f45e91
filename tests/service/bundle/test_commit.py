"""Committing a bundle: what is listed, what makes it partial, and what is never touched."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sentinel.bundle.commit import BundleRequest, PresentPart, commit
from sentinel.bundle.manifest import PARAMETERS_FILE, PART_FILE, Manifest
from sentinel.bundle.paths import BUNDLES_DIRECTORY, MANIFEST_FILE, BundleRefused, part_directory, rank_of_directory
from sentinel.wire import names

MakePart = Callable[..., Path]
RequestOf = Callable[..., BundleRequest]


def test_names_are_those_of_the_wire() -> None:
    """Ranks and the coordinator derive the same paths, though the bundle may not import the wire."""
    assert (MANIFEST_FILE, BUNDLES_DIRECTORY) == (names.MANIFEST, names.BUNDLES)
    for rank in (0, 7, 99_999, 123_456):
        assert part_directory(rank) == names.rank_directory(rank)
        assert rank_of_directory(names.rank_directory(rank)) == rank
    assert rank_of_directory("rank-000001") is None


def test_a_whole_bundle_lists_every_file_with_its_digest(
    tmp_path: Path, make_part: MakePart, request_of: RequestOf
) -> None:
    """With every rank's part here the manifest is complete and its digests are those of the files."""
    parts = [make_part(rank) for rank in (0, 1)]
    returned = commit(tmp_path, request_of(0, 1))
    manifest = Manifest.model_validate_json((parts[0].parent / MANIFEST_FILE).read_bytes())
    assert manifest == returned
    assert manifest.complete
    assert {entry.path for entry in manifest.files} == {
        f"rank-0000{rank}/{name}" for rank in (0, 1) for name in (PART_FILE, PARAMETERS_FILE)
    }
    for entry in manifest.files:
        content = (parts[0].parent / entry.path).read_bytes()
        assert (entry.bytes, entry.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_a_missing_part_makes_it_partial_and_a_late_one_completes_it(
    tmp_path: Path, make_part: MakePart, request_of: RequestOf
) -> None:
    """Committing again after a late part replaces the manifest as a whole."""
    make_part(0)
    first = commit(tmp_path, request_of(0, missing=(1,)))
    assert (first.complete, first.missing_ranks) == (False, (1,))
    make_part(1)
    second = commit(tmp_path, request_of(0, 1))
    assert (second.complete, second.missing_ranks) == (True, ())
    assert sorted(p.name for p in (tmp_path / "bundles/a0-r000003").iterdir()) == [
        MANIFEST_FILE,
        "rank-00000",
        "rank-00001",
    ]


def test_a_part_whose_report_was_lost_is_found_on_disk(
    tmp_path: Path, make_part: MakePart, request_of: RequestOf
) -> None:
    """The disk is believed before the reports."""
    make_part(0)
    make_part(1, node=4)
    manifest = commit(tmp_path, request_of(0))
    assert manifest.complete
    assert manifest.parts[1].node == 4


def test_a_part_on_another_host_is_remote(tmp_path: Path, make_part: MakePart, request_of: RequestOf) -> None:
    """A part that its rank wrote elsewhere is listed as remote, and the bundle here is partial."""
    make_part(0)
    elsewhere = PresentPart(1, 1, "/other/run/bundles/a0-r000003/rank-00001")
    manifest = commit(tmp_path, request_of(parts=(*request_of(0).parts, elsewhere)))
    assert manifest.parts[1].remote
    assert (manifest.complete, manifest.missing_ranks) == (False, (1,))
    assert all(entry.path.startswith("rank-00000/") for entry in manifest.files)


def test_a_part_that_could_not_be_written_keeps_its_reason(
    tmp_path: Path, make_part: MakePart, request_of: RequestOf
) -> None:
    """A rank's own error is in the manifest."""
    make_part(0)
    failed = PresentPart(1, 0, "", "no space left on device")
    manifest = commit(tmp_path, request_of(parts=(*request_of(0).parts, failed)))
    assert (manifest.parts[1].complete, manifest.parts[1].error) == (False, "no space left on device")
    assert not manifest.complete


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda part: (part / PART_FILE).unlink(), "cannot be opened"),
        (lambda part: (part / PART_FILE).write_text("{"), "not a part's header"),
        (lambda part: (part / PART_FILE).write_text("[1]"), "not a part's header"),
        (lambda part: (part / "passwd").symlink_to("/etc/passwd"), "symlink"),
        (lambda part: (part / "inner").mkdir(), "not a plain file"),
        (lambda part: os.mkfifo(part / "pipe"), "not a plain file"),
        (lambda part: (part / "..hidden").write_text(""), "no file of a part"),
    ],
    ids=["no header", "not json", "other json", "symlink", "directory", "fifo", "name"],
)
def test_a_damaged_part_is_listed_as_not_whole(
    tmp_path: Path, make_part: MakePart, request_of: RequestOf, damage: Callable[[Path], None], reason: str
) -> None:
    """A part that is not what a part is makes the bundle partial, with the reason, and none of its files is listed."""
    make_part(0)
    damage(make_part(1))
    manifest = commit(tmp_path, request_of(0, 1))
    assert manifest.missing_ranks == (1,)
    assert reason in manifest.parts[1].error
    assert all(entry.path.startswith("rank-00000/") for entry in manifest.files)


@pytest.mark.parametrize("change", [{"run_id": "other"}, {"round": 4}, {"attempt": 1}])
def test_a_part_of_another_run_or_round_is_not_taken(
    tmp_path: Path, make_part: MakePart, request_of: RequestOf, change: dict[str, object]
) -> None:
    """A header that belongs elsewhere is refused, whatever the directory is called."""
    make_part(0)
    make_part(1, **change)
    manifest = commit(tmp_path, request_of(0, 1))
    assert manifest.missing_ranks == (1,)
    assert "another run" in manifest.parts[1].error


def test_a_part_directory_that_is_a_symlink_is_not_followed(
    tmp_path: Path, make_part: MakePart, request_of: RequestOf
) -> None:
    """A rank's directory may not point elsewhere."""
    real = make_part(1)
    outside = real.rename(tmp_path / "outside")
    real.symlink_to(outside)
    make_part(0)
    assert commit(tmp_path, request_of(0, 1)).missing_ranks == (1,)


@pytest.mark.parametrize("bundle", ["../evil", "a/b", "", ".", "..", "a\0b", "x" * 300, "é"])
def test_a_bundle_id_that_is_a_path_is_refused(tmp_path: Path, request_of: RequestOf, bundle: str) -> None:
    """Only plain names become directories; nothing is written for any other."""
    with pytest.raises(BundleRefused, match="not a bundle id"):
        commit(tmp_path, request_of(id=bundle))
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_directory_that_is_a_symlink_is_refused(tmp_path: Path, request_of: RequestOf) -> None:
    """The manifest never lands outside of the run's bundles."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles/a0-r000003").symlink_to(outside)
    with pytest.raises(BundleRefused, match="cannot be opened"):
        commit(tmp_path, request_of(0))
    assert list(outside.iterdir()) == []


def test_a_manifest_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, make_part: MakePart, request_of: RequestOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing disk at the second commit leaves the first manifest whole and no temporary file."""
    make_part(0)
    commit(tmp_path, request_of(0))
    before = (tmp_path / "bundles/a0-r000003/manifest.json").read_text()

    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        commit(tmp_path, request_of(0, step=4))
    bundle = tmp_path / "bundles/a0-r000003"
    assert (bundle / MANIFEST_FILE).read_text() == before
    assert sorted(p.name for p in bundle.iterdir()) == [MANIFEST_FILE, "rank-00000"]
    assert json.loads(before)["step"] == 3
