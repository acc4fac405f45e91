"""Parts put together: whole where every piece is there, refused where one is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import story
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from sentinel.bundle.manifest import PARAMETERS_FILE, Shard
from sentinel.bundle.merge import Merged
from sentinel.bundle.paths import BundleRefused
from sentinel.bundle.reader import Bundle

WHOLE = np.arange(20, dtype=np.float32).reshape(5, 4)


def bundle_of(run_dir: Path, parts: dict[int, tuple[dict[str, NDArray[Any]], dict[str, Shard]]]) -> Bundle:
    """A bundle with these tensors, and the places of those that are shards, in each rank's part."""
    for rank, (tensors, shards) in parts.items():
        part = story.write_part(run_dir, story.header(rank, shards=shards))
        (part / PARAMETERS_FILE).unlink(missing_ok=True)
        save_file(tensors, part / PARAMETERS_FILE)
    return Bundle.open(run_dir / "bundles" / story.BUNDLE)


def shard(row: int) -> dict[str, Shard]:
    """The place of rows from ``row`` on."""
    return {"w": Shard(shape=WHOLE.shape, offset=(row, 0))}


def test_shards_make_the_whole(tmp_path: Path) -> None:
    """Uneven rows of two ranks are one tensor again, and what both hold whole is there once."""
    bias = np.ones(3, dtype=np.float16)
    bundle = bundle_of(
        tmp_path, {0: ({"w": WHOLE[:3], "b": bias}, shard(0)), 1: ({"w": WHOLE[3:], "b": bias}, shard(3))}
    )
    merged = Merged(bundle)
    merged.write(tmp_path / "merged.safetensors")
    loaded = load_file(tmp_path / "merged.safetensors")
    assert merged.names == ("b", "w")
    assert np.array_equal(loaded["w"], WHOLE)
    assert np.array_equal(loaded["b"], bias)
    assert loaded["w"].dtype == np.float32


def test_a_missing_piece_is_refused(tmp_path: Path) -> None:
    """Half a parameter is none: the name is said, and nothing is written."""
    bundle = bundle_of(tmp_path, {0: ({"w": WHOLE[:3]}, shard(0))})
    with pytest.raises(BundleRefused, match="w lacks pieces"):
        Merged(bundle)


def test_a_header_cannot_ask_for_memory(tmp_path: Path) -> None:
    """A whole that is larger than all pieces together is refused before it is made."""
    huge = {"w": Shard(shape=(10**9, 10**9), offset=(0, 0))}
    with pytest.raises(BundleRefused, match="w lacks pieces"):
        Merged(bundle_of(tmp_path, {0: ({"w": WHOLE[:3]}, huge)}))


@pytest.mark.parametrize(
    ("values", "place", "problem"),
    [
        (WHOLE[:3], Shard(shape=(5, 4), offset=(4, 0)), "lies outside"),
        (WHOLE[:3], Shard(shape=(6, 4), offset=(3, 0)), "another shape or dtype"),
        (WHOLE[:3], Shard(shape=(5, 4), offset=(-1, 0)), "lies outside"),
        (WHOLE[:3].astype(np.float64), Shard(shape=(5, 4), offset=(0, 0)), "another shape or dtype"),
        (WHOLE[:3], Shard(shape=(5, 4), offset=(0,)), "another shape or dtype"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(tmp_path: Path, values: NDArray[Any], place: Shard, problem: str) -> None:
    """A header that lies about a piece's place is an error that names the tensor and the rank."""
    bundle = bundle_of(tmp_path, {0: ({"w": WHOLE[:3]}, shard(0)), 1: ({"w": values}, {"w": place})})
    with pytest.raises(BundleRefused, match=problem):
        Merged(bundle)
