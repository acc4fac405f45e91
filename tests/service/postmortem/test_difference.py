"""Two parts compared, bit by bit and in numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import story
from numpy.typing import NDArray
from safetensors.numpy import save_file

from sentinel.bundle.manifest import PARAMETERS_FILE, RNG_FILE
from sentinel.bundle.reader import Bundle, Part
from sentinel.postmortem.difference import PartDifference, TensorDifference, compare, describe_difference
from sentinel.wire.names import rank_directory

Tensors = dict[str, NDArray[np.generic]]


def part(run_dir: Path, rank: int, tensors: Tensors, file: str = PARAMETERS_FILE, **changes: object) -> Part:
    """A part on disk with these tensors."""
    place = story.write_part(run_dir, story.header(rank, **changes))
    save_file(tensors, place / file)
    return Bundle.open(place.parent).part(rank)


def compared(tmp_path: Path, a: Tensors, b: Tensors, file: str = PARAMETERS_FILE) -> dict[str, TensorDifference]:
    """The differences of two parts whose ``file`` holds ``a`` and ``b``, by tensor."""
    found = compare(part(tmp_path / "a", 0, a, file), part(tmp_path / "b", 0, b, file), ("A", "B"))
    return {tensor.name: tensor for tensor in found.tensors if tensor.file == file}


def test_equal_tensors_are_equal(tmp_path: Path) -> None:
    """The same bits are equal, NaN too."""
    values = {"w": np.array([1.0, np.nan, -0.0], np.float32)}
    assert compared(tmp_path, values, values)["w"].relation == "equal"


def test_differences_are_counted_in_elements(tmp_path: Path) -> None:
    """How many elements differ, the largest difference, and how many are not finite on each side."""
    a = {"w": np.array([1.0, 2.0, np.nan, 4.0], np.float32)}
    b = {"w": np.array([1.0, 2.5, 3.0, np.inf], np.float32)}
    found = compared(tmp_path, a, b)["w"]
    assert (found.relation, found.elements, found.of) == ("different", 3, 4)
    assert (found.largest, found.nonfinite_a, found.nonfinite_b) == (0.5, 1, 1)


def test_sign_of_zero_is_a_difference_in_bits(tmp_path: Path) -> None:
    """Equal in numbers is not equal in bits: both are said."""
    found = compared(tmp_path, {"w": np.array([0.0])}, {"w": np.array([-0.0])})["w"]
    assert (found.relation, found.elements, found.largest) == ("different", 1, 0.0)


def test_shapes_and_absence_are_named(tmp_path: Path) -> None:
    """A tensor of another shape or dtype, or of one part only, is named as that."""
    a = {"w": np.zeros(3), "x": np.zeros(2, np.float32), "only": np.zeros(1)}
    b = {"w": np.zeros(4), "x": np.zeros(2, np.float16), "other": np.zeros(1)}
    found = compared(tmp_path, a, b)
    assert {name: one.relation for name, one in found.items()} == {
        "w": "other_shape",
        "x": "other_shape",
        "only": "only_a",
        "other": "only_b",
    }


def test_float64_extremes_do_not_warn(tmp_path: Path) -> None:
    """The difference of float64's extremes overflows to inf and nothing else happens."""
    found = compared(tmp_path, {"w": np.array([1.7e308])}, {"w": np.array([-1.7e308])})["w"]
    assert found.largest == float("inf")


def test_generator_states_are_compared_in_bits_only(tmp_path: Path) -> None:
    """A random state that differs has a count of elements and no size of the difference."""
    found = compared(tmp_path, {"b0.cpu": np.zeros(8, np.uint8)}, {"b0.cpu": np.ones(8, np.uint8)}, RNG_FILE)["b0.cpu"]
    assert (found.elements, found.largest) == (8, None)


def test_facts_that_differ_are_listed(tmp_path: Path) -> None:
    """Loss, rank and environment are compared; two NaN losses are no difference."""
    a = part(tmp_path / "a", 0, {"w": np.zeros(1)}, loss=float("nan"))
    b = part(tmp_path / "b", 1, {"w": np.zeros(1)}, loss=float("nan"), loss_scale=512.0)
    assert {field.name for field in compare(a, b, ("A", "B")).fields} == {"rank", "loss_scale"}


def text_of(tmp_path: Path, a: Tensors, b: Tensors) -> tuple[PartDifference, str]:
    """A comparison and its text."""
    found = compare(part(tmp_path / "a", 0, a), part(tmp_path / "b", 0, b), ("A", "B"))
    return found, describe_difference(found)


def test_text_puts_the_worst_first(tmp_path: Path) -> None:
    """What is nonfinite on one side stands above large differences, and those above small ones."""
    a = {name: np.zeros(2, np.float32) for name in ("small", "large", "bad")}
    b = {"small": np.float32([0, 1e-9]), "large": np.float32([0, 1e9]), "bad": np.float32([0, np.nan])}
    _, text = text_of(tmp_path, a, b)
    assert text.index("\nbad ") < text.index("\nlarge ") < text.index("\nsmall ")


def test_text_of_equal_parts_says_so(tmp_path: Path) -> None:
    """Parts without a difference end with one sentence."""
    found, text = text_of(tmp_path, {"w": np.ones(3)}, {"w": np.ones(3)})
    assert found.equal
    assert text.endswith("Every tensor is in both, bit for bit.")


def test_rank_directories_are_parts(tmp_path: Path) -> None:
    """The parts of two ranks of one bundle compare like those of two bundles."""
    bundle = Bundle.open(story.write_bundle(tmp_path))
    found = compare(bundle.part(0), bundle.part(1), (rank_directory(0), rank_directory(1)))
    assert {tensor.relation for tensor in found.tensors} == {"equal"}
    assert {field.name for field in found.fields} == {"rank", "loss"}
