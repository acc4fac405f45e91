"""Capturing a micro-batch: every container and dtype, bounded, and never by running the user's code."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel_agent.capture import MAX_DEPTH, MAX_LEAVES, Captured, Drop, capture, released, walk_tensors
from sentinel_agent.structure import describe

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Sample:
    image: torch.Tensor
    label: int


class PlainBatch:
    """What a user's collate function may return."""

    def __init__(self) -> None:
        self.inputs = torch.ones(2)
        self.password = "not a tensor"


def _take(value: object, clone_below: int = 1 << 20) -> tuple[Captured, Counter[str]]:
    drops: Counter[str] = Counter()
    return capture(value, clone_below, {}, drops), drops


def _json(captured: Captured) -> Any:
    names = {held: path for path, held in reversed(list(walk_tensors(captured.tree, "b0")))}
    return describe(captured.tree, names, {})


def test_small_tensors_are_cloned_and_large_ones_referred_to() -> None:
    """A change in place after the capture reaches the large tensor only, and is noticed there."""
    small, large = torch.zeros(4), torch.zeros(100)
    captured, _ = _take((small, large), clone_below=64)
    small.add_(1)
    large.add_(1)
    kept_small, kept_large = captured.held
    assert kept_small.tensor.sum() == 0
    assert not kept_small.changed()
    assert kept_large.tensor.data_ptr() == large.data_ptr()
    assert kept_large.changed()


def test_a_large_tensor_that_nobody_touched_is_unchanged() -> None:
    """Reading a tensor does not count as a change."""
    large = torch.randn(100)
    captured, _ = _take(large, clone_below=1)
    large.sum(), large[3].item(), large * 2
    assert not captured.held[0].changed()


def test_the_graph_of_an_input_is_not_kept_alive() -> None:
    """A forward input that requires gradients is held without its graph."""
    given = torch.ones(100, requires_grad=True) * 2
    alive = weakref.ref(given)
    captured, _ = _take(given, clone_below=1)
    del given
    gc.collect()
    assert alive() is None
    assert captured.held[0].tensor.grad_fn is None


def test_large_arrays_are_probed_for_changes() -> None:
    """A numpy array above the limit is kept by reference, and overwriting it is noticed although arrays have no version."""
    array = np.zeros(1000)
    captured, _ = _take({"a": array}, clone_below=8)
    assert not captured.held[0].changed()
    array[:] = 1
    assert captured.held[0].changed()


def test_every_container_is_mirrored() -> None:
    """Lists, tuples, dicts, named tuples, dataclasses, mappings and plain objects keep their kind and order."""
    t = torch.zeros(1)
    value = [
        (t, 1),
        {"x": "text", "y": None},
        Pair(1.5, True),
        Sample(t, 3),
        OrderedDict(k=2),
        UserDict({"u": 4}),
        PlainBatch(),
        {5: "five"},
    ]
    described = _json(_take(value)[0])
    assert described[0] == {"tuple": [{"tensor": "b0.0.0"}, 1]}
    assert described[1] == {"x": "text", "y": None}
    assert described[2]["items"] == [["first", 1.5], ["second", True]]
    assert described[2]["namedtuple"].endswith(":Pair")
    assert described[3]["items"] == [["image", {"tensor": "b0.0.0"}], ["label", 3]]
    assert described[4] == {"mapping": "collections:OrderedDict", "items": [["k", 2]]}
    assert described[5] == {"mapping": "collections:UserDict", "items": [["u", 4]]}
    assert described[6]["items"] == [["inputs", {"tensor": "b0.6.inputs"}]]
    assert described[7] == {"dict": [[5, "five"]]}


def test_a_key_that_looks_like_a_tag_is_not_mistaken_for_one() -> None:
    """A user's dict with the key 'tensor' is spelled so that a reader cannot take it for a tensor's name."""
    assert _json(_take({"tensor": "b0.fake"})[0]) == {"dict": [["tensor", "b0.fake"]]}


def test_values_that_json_lacks_are_tagged() -> None:
    """NaN, infinities, complex numbers, bytes, dtypes and devices survive as tagged objects; long text is cut."""
    value = [float("nan"), float("-inf"), 1 + 2j, b"\x01", torch.float16, torch.device("cpu"), "x" * 20000]
    described = _json(_take(value)[0])
    assert described[0] == {"float": "nan"}
    assert described[1] == {"float": "-inf"}
    assert described[2] == {"complex": [1.0, 2.0]}
    assert described[3] == {"bytes": "01", "length": 1}
    assert described[4] == {"dtype": "torch.float16"}
    assert described[5] == {"device": "cpu"}
    assert described[6]["length"] == 20000


def test_a_shared_tensor_is_held_once() -> None:
    """The same tensor in two places is one held tensor."""
    t = torch.zeros(3)
    captured, _ = _take({"a": t, "b": [t]})
    assert len(captured.held) == 1
    assert _json(captured) == {"a": {"tensor": "b0.a"}, "b": [{"tensor": "b0.a"}]}


def test_unknown_types_are_left_out_and_counted() -> None:
    """An object that is neither container nor tensor is omitted with its type, and the rest is kept."""
    captured, drops = _take({"x": torch.zeros(1), "f": open})
    assert drops == {Drop.UNSUPPORTED_TYPE: 1}
    assert _json(captured)["f"]["omitted"] == "unsupported_type"
    assert len(captured.held) == 1


def test_depth_and_leaves_are_bounded() -> None:
    """A structure that contains itself and one of very many leaves end in a named omission, not in a hang."""
    knot: list[Any] = []
    knot.append(knot)
    _, drops = _take(knot)
    assert drops == {Drop.TOO_DEEP: 1}
    _, drops = _take([[object() for _ in range(MAX_LEAVES + 1)]])
    assert drops == {Drop.TOO_MANY_LEAVES: 1}
    assert MAX_DEPTH >= 4


def test_a_long_list_of_numbers_is_one_leaf() -> None:
    """Token ids that were never made a tensor are kept whole."""
    ids = list(range(5000))
    captured, drops = _take({"ids": ids})
    assert _json(captured) == {"ids": ids}
    assert not drops


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, device="meta"), torch.ones(2, 2).to_mkldnn()],
    ids=["meta", "opaque layout"],
)
def test_tensors_without_plain_contents_are_left_out(tensor: torch.Tensor) -> None:
    """A meta tensor and one in a layout of its own are omitted with a reason."""
    captured, drops = _take(tensor)
    assert captured.held == ()
    assert drops.total() == 1


def test_tensors_of_a_function_transform_are_left_out() -> None:
    """Inside torch.func the inputs are wrappers that die with the transform: they are not held."""
    seen: list[Counter[str]] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        seen.append(_take(x)[1])
        return (x**2).sum()

    torch.func.vmap(loss)(torch.ones(2, 3))
    assert seen == [Counter({Drop.NO_STORAGE: 1})]


def test_inference_tensors_and_parameters_are_held() -> None:
    """A tensor without a version counter and a Parameter are captured like others."""
    with torch.inference_mode():
        inference = torch.ones(100)
    captured, drops = _take([inference, torch.nn.Parameter(torch.ones(2))], clone_below=8)
    assert len(captured.held) == 2
    assert not captured.held[0].changed()
    assert not drops


def test_a_dataclass_property_of_the_user_is_not_run() -> None:
    """Only fields are read; a property that raises is never touched."""

    @dataclass
    class Fussy:
        x: int = 1

        @property
        def trap(self) -> int:
            raise AssertionError("the user's code was run")

    assert _json(_take(Fussy())[0])["items"] == [["x", 1]]


def test_released_keeps_the_structure() -> None:
    """Giving up the tensors leaves their dtype and shape in the structure."""
    captured = released(_take({"x": torch.zeros(2, 3), "n": 1})[0], Drop.BYTE_CAP)
    assert captured.held == ()
    assert _json(captured) == {"x": {"omitted": "byte_cap", "type": "torch.float32 (2, 3)"}, "n": 1}


_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text(max_size=5)
    | st.floats(allow_nan=False, width=32)
)
_tensors = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]).map(
    lambda dtype: torch.arange(6).reshape(2, 3).to(dtype)
)
_trees = st.recursive(
    _scalars | _tensors,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), children, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(_trees)
def test_any_tree_keeps_all_of_its_tensors(tree: Any) -> None:
    """Whatever the nesting, every tensor is held with its value, unless the tree was deeper than the bound."""
    captured, drops = _take(tree)
    expected = []

    def collect(node: Any) -> None:
        if isinstance(node, torch.Tensor):
            expected.append(node)
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ():
            collect(child)

    collect(tree)
    found = [held.tensor for _, held in walk_tensors(captured.tree)]
    if not drops:
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))
    assert set(drops) <= {Drop.TOO_DEEP}
