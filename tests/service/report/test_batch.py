"""What a page shows of a batch: the right form for each tensor, odd samples first, and never more than fits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import story
from numpy.typing import NDArray
from safetensors.numpy import save_file

from sentinel.bundle.manifest import BATCHES_FILE, SampleFinding
from sentinel.bundle.reader import Bundle
from sentinel.postmortem.report.batch import SAMPLES_SHOWN, TENSORS_SHOWN, BatchView, Proven, batch_view
from sentinel.wire.names import rank_directory


def viewed(tmp_path: Path, tensors: dict[str, NDArray[np.generic]], odd: tuple[int, ...] = ()) -> BatchView:
    """The view of rank 1's part whose batch holds ``tensors``; ``odd`` samples of b0.x are constant."""
    path = story.write_bundle(tmp_path)
    save_file(tensors, path / rank_directory(1) / BATCHES_FILE)
    bundle = Bundle.open(path)
    findings = tuple(SampleFinding(tensor="b0.x", sample=i, what="constant", detail="") for i in odd)
    return batch_view(bundle, story.header(1, sample_findings=findings), suspect=True)


@pytest.mark.parametrize(
    ("array", "form"),
    [
        (np.zeros((4, 3, 8, 8), np.float32), "images"),
        (np.zeros((4, 8, 8, 3), np.uint8), "images"),
        (np.zeros((4, 28, 28), np.uint8), "images"),
        (np.zeros((4, 1, 16, 16), np.bool_), "images"),
        (np.zeros((4, 12), np.int64), "tokens"),
        (np.zeros(16, np.int64), "labels"),
        (np.zeros((4, 64), np.float32), "rows"),
        (np.zeros((4, 3), np.float16), "rows"),
        (np.zeros((4, 7, 5), np.float32), "numbers"),
        (np.zeros((2, 3, 4, 8, 8), np.float32), "numbers"),
        (np.zeros((), np.float32), "numbers"),
    ],
)
def test_each_tensor_is_shown_as_what_it_is(tmp_path: Path, array: NDArray[np.generic], form: str) -> None:
    """Images in either layout are pictures, integers are ids, float rows are strips, the rest is a histogram."""
    (view,) = viewed(tmp_path, {"b0.x": array}).tensors
    assert view.form == form
    assert not view.problem


def test_odd_samples_are_always_among_those_shown(tmp_path: Path) -> None:
    """Of 500 samples the odd ones are shown, marked, with the first others around them."""
    (view,) = viewed(
        tmp_path, {"b0.x": np.random.default_rng(0).normal(size=(500, 8)).astype("f4")}, odd=(3, 450)
    ).tensors
    assert len(view.samples) == SAMPLES_SHOWN
    assert [sample.index for sample in view.samples if sample.odd] == [3, 450]
    assert view.samples_total == 500


def test_samples_proven_guilty_are_marked_where_the_batch_has_their_size(tmp_path: Path) -> None:
    """Replay's samples are marked in tensors of the batch's size, and in no others."""
    tensors = {
        "b0.x": np.zeros((16, 8), np.float32),
        "b0.y": np.zeros(16, np.int64),
        "b0.z": np.zeros((3, 8), np.float32),
    }
    path = story.write_bundle(tmp_path)
    save_file(tensors, path / rank_directory(1) / BATCHES_FILE)
    view = batch_view(Bundle.open(path), story.header(1, sample_findings=()), True, Proven((12,), 16))
    marked = {tensor.name: [sample.index for sample in tensor.samples if sample.odd] for tensor in view.tensors}
    assert marked == {"b0.x": [12], "b0.y": [12], "b0.z": []}


def test_data_set_index_stands_beside_the_sample(tmp_path: Path) -> None:
    """A sample says which element of the data set it is, if the sampler's indices were recorded."""
    (view,) = viewed(tmp_path, {"b0.x": np.zeros((16, 1, 16, 16), np.float32)}).tensors
    assert view.samples[5].data_set_index == 224 + 1 + 2 * 5


def test_other_rounds_batches_are_left_out(tmp_path: Path) -> None:
    """The window holds the round before too; only the part's own round is shown."""
    view = viewed(tmp_path, {"b0.x": np.zeros(3, np.int64), "b9.x": np.zeros(3, np.int64)})
    assert [tensor.name for tensor in view.tensors] == ["b0.x"]


def test_page_is_bounded_by_tensors(tmp_path: Path) -> None:
    """A batch of many tensors shows the first few and says how many more there are."""
    view = viewed(tmp_path, {f"b0.x{i}": np.zeros(2, np.int64) for i in range(TENSORS_SHOWN + 5)})
    assert (len(view.tensors), view.left_out) == (TENSORS_SHOWN, 5)


def test_extreme_values_are_counted_without_overflow(tmp_path: Path) -> None:
    """A histogram of float64's extremes, NaN and infinities counts the finite elements and raises no warning."""
    array = np.array([[1.7e308, -1.7e308, np.nan, np.inf, 0.0]])
    (view,) = viewed(tmp_path, {"b0.x": array}).tensors
    assert (view.nan, view.inf, sum(view.counts)) == (1, 1, 3)


def test_empty_tensor_says_so(tmp_path: Path) -> None:
    """A tensor without elements is named and not drawn."""
    (view,) = viewed(tmp_path, {"b0.x": np.zeros((0, 3, 8, 8), np.float32)}).tensors
    assert view.problem == "no elements"
