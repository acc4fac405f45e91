"""Verifying a bundle: every difference to what was committed, by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from sentinel.bundle.commit import BundleRequest, commit
from sentinel.bundle.manifest import PARAMETERS_FILE, PART_FILE
from sentinel.bundle.paths import MANIFEST_FILE, BundleRefused
from sentinel.bundle.verify import Problem, ProblemKind, verify

MakePart = Callable[..., Path]
RequestOf = Callable[..., BundleRequest]


@pytest.fixture
def bundle(tmp_path: Path, make_part: MakePart, request_of: RequestOf) -> Path:
    """A committed bundle of two ranks."""
    make_part(0)
    make_part(1)
    commit(tmp_path, request_of(0, 1))
    return tmp_path / "bundles/a0-r000003"


def kinds(problems: list[Problem]) -> list[tuple[str, ProblemKind]]:
    """Path and kind of each problem."""
    return [(problem.path, problem.kind) for problem in problems]


def test_an_untouched_bundle_has_no_problem(bundle: Path) -> None:
    """What was committed verifies, by directory and by manifest."""
    assert verify(bundle) == verify(bundle / MANIFEST_FILE) == []


def test_a_changed_byte_is_found(bundle: Path) -> None:
    """A file of the right size with other content fails its digest."""
    path = bundle / "rank-00001" / PARAMETERS_FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert kinds(verify(bundle)) == [(f"rank-00001/{PARAMETERS_FILE}", ProblemKind.SHA256)]


def test_a_truncated_file_is_found_by_its_size(bundle: Path) -> None:
    """A shorter file is named with both sizes."""
    path = bundle / "rank-00001" / PARAMETERS_FILE
    path.write_bytes(path.read_bytes()[:-1])
    [problem] = verify(bundle)
    assert problem.kind is ProblemKind.SIZE
    assert "committed with" in str(problem)


def test_missing_and_extra_files_are_found(bundle: Path) -> None:
    """Files and parts that went away, and those that nobody committed, are told apart."""
    (bundle / "rank-00000" / PARAMETERS_FILE).rename(bundle / "rank-00000" / "other.safetensors")
    (bundle / "notes.txt").write_text("")
    (bundle / "rank-00007").mkdir()
    assert sorted(kinds(verify(bundle))) == [
        ("notes.txt", ProblemKind.EXTRA),
        ("rank-00000/other.safetensors", ProblemKind.EXTRA),
        (f"rank-00000/{PARAMETERS_FILE}", ProblemKind.MISSING),
        ("rank-00007", ProblemKind.EXTRA),
    ]


def test_a_missing_part_is_found(bundle: Path) -> None:
    """A rank's directory that is gone misses each of its files."""
    (bundle / "rank-00000").rename(bundle.parent / "gone")
    assert kinds(verify(bundle)) == [
        (f"rank-00000/{PARAMETERS_FILE}", ProblemKind.MISSING),
        (f"rank-00000/{PART_FILE}", ProblemKind.MISSING),
    ]


def test_a_symlink_in_place_of_a_file_is_found(bundle: Path, tmp_path: Path) -> None:
    """A link is no file, even to the very same content."""
    path = bundle / "rank-00000" / PART_FILE
    path.rename(tmp_path / "copy")
    path.symlink_to(tmp_path / "copy")
    assert kinds(verify(bundle)) == [(f"rank-00000/{PART_FILE}", ProblemKind.NOT_A_FILE)]


@pytest.mark.parametrize(
    "path", ["../../../etc/passwd", "/etc/passwd", "rank-00000/../x", "part.json", "rank-00000/a/b", "rank-0/x"]
)
def test_a_manifest_that_lists_other_paths_reads_none_of_them(bundle: Path, path: str) -> None:
    """A listed path outside of the bundle is a problem of its own and is never opened."""
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    manifest["files"][0]["path"] = path
    (bundle / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert [p.kind for p in verify(bundle)][:2] == [ProblemKind.SHA256, ProblemKind.PATH_REFUSED]


def test_a_bundle_without_a_manifest_was_never_committed(make_part: MakePart) -> None:
    """There is nothing to compare with, and that is what is said."""
    assert kinds(verify(make_part(0).parent)) == [(MANIFEST_FILE, ProblemKind.NO_MANIFEST)]


def test_a_manifest_that_is_none_is_a_problem(bundle: Path) -> None:
    """A torn manifest is reported, not raised."""
    (bundle / MANIFEST_FILE).write_text('{"id":')
    assert kinds(verify(bundle)) == [(MANIFEST_FILE, ProblemKind.MANIFEST_REFUSED)]


def test_no_bundle_at_all_is_refused(tmp_path: Path) -> None:
    """Verifying what is not there is an error, not an empty list."""
    with pytest.raises(BundleRefused, match="no bundle at"):
        verify(tmp_path / "absent")


@pytest.mark.parametrize("seed", range(10))
def test_every_random_corruption_is_found(bundle: Path, seed: int) -> None:
    """A hundred changed bytes and cut ends for each seed, anywhere in any file, the manifest too: each is a problem."""
    draw = random.Random(seed)
    files = [path for path in sorted(bundle.rglob("*")) if path.is_file()]
    whole = {path: path.read_bytes() for path in files}
    for _ in range(100):
        path = draw.choice(files)
        content = bytearray(whole[path])
        at = draw.randrange(len(content))
        if draw.random() < 0.3:
            del content[at:]
        else:
            content[at] ^= draw.randrange(1, 256)
        path.write_bytes(content)
        assert verify(bundle), f"seed {seed}: {path.name} at byte {at}"
        path.write_bytes(whole[path])
    assert verify(bundle) == []
