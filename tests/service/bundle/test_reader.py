"""Reading bundles: with or without a manifest, and never trusting what is in them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sentinel.bundle.commit import BundleRequest, commit
from sentinel.bundle.manifest import BATCHES_FILE, PARAMETERS_FILE, PART_FILE
from sentinel.bundle.paths import MANIFEST_FILE
from sentinel.bundle.reader import Bundle, BundleRefused

MakePart = Callable[..., Path]
RequestOf = Callable[..., BundleRequest]


def test_a_committed_bundle_opens_by_directory_and_by_manifest(
    tmp_path: Path, make_part: MakePart, request_of: RequestOf
) -> None:
    """Both paths that people have at hand give the same bundle."""
    bundle = make_part(0).parent
    make_part(1)
    commit(tmp_path, request_of(0, 1))
    for path in (bundle, bundle / MANIFEST_FILE, str(bundle)):
        opened = Bundle.open(path)
        assert (opened.id, opened.ranks, opened.partial, opened.missing_ranks) == ("a0-r000003", (0, 1), False, ())
        assert opened.parts[1].header.rank == 1


def test_a_bundle_without_manifest_is_partial(make_part: MakePart) -> None:
    """Before the commit the parts can be read, and their headers say who is missing."""
    opened = Bundle.open(make_part(0).parent)
    assert opened.manifest is None
    assert (opened.partial, opened.missing_ranks, opened.id) == (True, (1,), "a0-r000003")


def test_nan_in_a_header_stays_nan(make_part: MakePart) -> None:
    """The loss that was NaN when the part was written is NaN when it is read."""
    loss = Bundle.open(make_part(0).parent).part(0).header.loss
    assert loss is not None
    assert math.isnan(loss)


def test_tensors_of_a_part_are_read_on_demand(make_part: MakePart) -> None:
    """A part gives its tensor files, and None for one it does not have."""
    part = Bundle.open(make_part(0).parent).part(0)
    tensors = part.tensors(PARAMETERS_FILE)
    assert tensors is not None
    assert tensors.array("w").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert part.tensors(BATCHES_FILE) is None
    assert part.files == (PARAMETERS_FILE, PART_FILE)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/b", "a\0b", ".."])
def test_a_tensor_file_outside_of_the_part_is_refused(make_part: MakePart, name: str) -> None:
    """A file name is a name: a path is refused, whether or not something lies there."""
    part_path = make_part(0)
    (part_path.parent.parent / "secret").write_text("x")
    part = Bundle.open(part_path.parent).part(0)
    with pytest.raises(BundleRefused, match="not a file name"):
        part.tensors(name)


def test_what_is_no_bundle_is_refused_in_one_line(tmp_path: Path) -> None:
    """Absent, empty, or a file: each is one clear refusal."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for path in (
        tmp_path / "absent",
        tmp_path / "empty",
        tmp_path / "file",
        tmp_path / "nul\0",
        tmp_path / "absent" / MANIFEST_FILE,
    ):
        with pytest.raises(BundleRefused) as refused:
            Bundle.open(path)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"id": "x"}', "\ud800".encode("utf-8", "surrogatepass"), b"\xff\xfe", "[" * 100_000],
    ids=["empty", "torn", "list", "null", "fields", "surrogate", "bytes", "deep"],
)
def test_a_manifest_that_is_none_is_refused(make_part: MakePart, content: str | bytes) -> None:
    """Anything but a manifest under its name refuses the bundle."""
    bundle = make_part(0).parent
    (bundle / MANIFEST_FILE).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BundleRefused, match=MANIFEST_FILE) as refused:
        Bundle.open(bundle)
    assert "\n" not in str(refused.value)


def test_a_manifest_that_names_a_path_is_refused(tmp_path: Path, make_part: MakePart, request_of: RequestOf) -> None:
    """The id inside a manifest is shown and joined to paths: it must be a name."""
    bundle = make_part(0).parent
    commit(tmp_path, request_of(0))
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    (bundle / MANIFEST_FILE).write_text(json.dumps(manifest | {"id": "../../etc"}))
    with pytest.raises(BundleRefused, match="names itself"):
        Bundle.open(bundle)


@pytest.mark.parametrize("name", [MANIFEST_FILE, "rank-00000/" + PART_FILE])
def test_symlinks_and_pipes_are_refused_without_being_opened(make_part: MakePart, tmp_path: Path, name: str) -> None:
    """A symlink is not followed and a FIFO does not hang the reader."""
    bundle = make_part(0).parent
    target = bundle / name
    for place in ("symlink", "pipe"):
        target.unlink(missing_ok=True)
        if place == "pipe":
            os.mkfifo(target)
        else:
            target.symlink_to(tmp_path / "bundles")
        with pytest.raises(BundleRefused, match=r"symlink|not a plain file"):
            Bundle.open(bundle).part(0)


def test_a_part_that_claims_another_rank_is_refused(make_part: MakePart) -> None:
    """A header must be of the rank its directory names."""
    part = make_part(0)
    (part / PART_FILE).write_text((part / PART_FILE).read_text().replace('"rank":0', '"rank":1'))
    with pytest.raises(BundleRefused, match="rank 1"):
        Bundle.open(part.parent).part(0)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300))
def test_any_bytes_as_header_are_refused_or_read(make_part: MakePart, tmp_path: Path, content: bytes) -> None:
    """Whatever bytes lie under a header's name, the answer is a refusal of one line."""
    part = tmp_path / "bundles/a0-r000003/rank-00000"
    if not part.exists():
        make_part(0)
    (part / PART_FILE).write_bytes(content)
    with pytest.raises(BundleRefused) as refused:
        Bundle.open(part.parent).part(0)
    assert "\n" not in str(refused.value)
