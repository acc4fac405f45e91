"""A captured batch is built again as it was."""

from __future__ import annotations

import math
import sys
from collections import Counter, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from sentinel_agent.capture import Held, capture, walk_tensors
from sentinel_agent.replay.bits import differing, digest, same_bits
from sentinel_agent.replay.rebuild import NotRebuildable, rebuild
from sentinel_agent.replay.recording import flat_tensors
from sentinel_agent.structure import describe

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    """A batch class of a user."""

    image: Tensor
    label: int


def there_and_back(value: Any, live: Any = None) -> Any:
    """Capture, describe as JSON would, and build again."""
    tree = capture(value, 1 << 20, {}, Counter()).tree
    held: dict[Held, str] = {one: path for path, one in walk_tensors(tree, "b0")}
    tensors = {n: h.tensor if h.array is None else torch.from_numpy(h.array.copy()) for h, n in held.items()}
    return rebuild(describe(tree, held, {}), tensors, live)


def test_nesting_comes_back() -> None:
    """Lists, tuples, dicts with any keys and plain values are what they were."""
    value = [1, (2.5, None), {"a": True, "b": [b"x"]}, {3: "four"}, math.inf, complex(1, -2), torch.float16]
    assert there_and_back(value) == value


def test_tensors_come_back_bit_by_bit() -> None:
    """Tensors and arrays keep their bits, NaN payloads too."""
    odd = torch.tensor([math.nan, -0.0, 1e-45])
    odd.view(torch.int32)[0] = 0x7FC01234
    back = there_and_back({"x": odd, "y": numpy.arange(3.0)})
    assert same_bits(back["x"], odd)
    assert back["y"].tolist() == [0.0, 1.0, 2.0]


def test_users_classes_come_back() -> None:
    """Named tuples and dataclasses of modules that the script has imported are built again."""
    sys.modules.setdefault(__name__, sys.modules[test_users_classes_come_back.__module__])
    back = there_and_back(Pair(torch.ones(2), Sample(torch.zeros(1), 7)))
    assert isinstance(back, Pair)
    assert isinstance(back.right, Sample)
    assert back.right.label == 7


def test_a_name_in_a_bundle_imports_nothing() -> None:
    """A class whose module is not imported is refused, and stays unimported."""
    assert "this" not in sys.modules
    with pytest.raises(NotRebuildable, match="this:Zen"):
        rebuild({"dataclass": "this:Zen", "items": []}, {})
    assert "this" not in sys.modules


def test_what_was_left_out_is_taken_from_the_live_batch() -> None:
    """An omitted leaf is the live batch's; without one it is refused by name."""
    structure = {"x": {"tensor": "b0.x"}, "extra": {"omitted": "unsupported_type", "type": "Graph"}}
    tensors = {"b0.x": torch.ones(1)}
    assert rebuild(structure, tensors, {"x": torch.zeros(1), "extra": "live"})["extra"] == "live"
    with pytest.raises(NotRebuildable, match="Graph"):
        rebuild(structure, tensors)


def test_floats_follow_the_precision_that_is_tried() -> None:
    """A recorded float16 input takes the dtype of what the script makes in another precision."""
    back = rebuild({"tensor": "b0"}, {"b0": torch.ones(2, dtype=torch.float16)}, torch.zeros(2))
    assert back.dtype is torch.float32


def test_flat_tensors_keep_their_order() -> None:
    """Tensors of nested values are listed in the user's order."""
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [t.numel() for t in flat_tensors([a, {"k": (b, 4)}, Sample(c, 1)])] == [1, 2, 3]


def test_bits_tell_signs_of_zeros_and_payloads() -> None:
    """0.0 and -0.0 differ, NaN equals NaN of the same bits, shapes and dtypes count."""
    assert differing(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == 1
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same_bits(torch.ones(2), torch.ones(3))
    assert differing(torch.ones(3), torch.ones(3, dtype=torch.float64)) == 3
    assert digest([("a", torch.ones(2))]) != digest([("b", torch.ones(2))])
