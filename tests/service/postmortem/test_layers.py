"""What a bundle's layer norms say: which layer grew, which broke first, and nothing where there is nothing to say."""

from __future__ import annotations

import math

import story

from sentinel.bundle.manifest import LayerNorms, PartHeader
from sentinel.postmortem.layers import layer_story

INF = math.inf


def header(rank: int, layers: dict[str, tuple[float | None, ...]], first: int = 0) -> PartHeader:
    """A part that kept these norms, one a round from ``first`` on."""
    rounds = tuple(range(first, first + max(map(len, layers.values()), default=0)))
    return story.header(rank, layer_norms=LayerNorms(rounds=rounds, layers=layers))


STEADY = (1.0,) * 24


def test_a_layer_that_grew_and_broke_is_said() -> None:
    """Growth is over the median of earlier rounds, and the first round that is not finite is named."""
    grew = (*STEADY, 3.0, 12.0, 50.0, INF)
    told = layer_story([header(0, {"down.1": grew, "head": (*STEADY, 1.0, 1.0, 1.0, 1.0)})])
    assert told is not None
    assert [one.name for one in told.layers] == ["down.1", "head"]
    assert told.sentences == (
        "the gradient norm of layer down.1 had grown 50-fold before, from 1 to 50",
        "in round 27 the norms of layers down.1 were not finite, of 2 layers",
    )


def test_steady_layers_say_nothing() -> None:
    """Ordinary ups and downs are worth no sentence."""
    told = layer_story([header(0, {"a": (*STEADY, 2.0, 0.5), "b": STEADY})])
    assert told is not None
    assert told.sentences == ()


def test_too_few_rounds_are_no_growth() -> None:
    """A layer's usual norm takes more than a handful of rounds."""
    told = layer_story([header(0, {"a": (1.0, 1.0, 900.0)})])
    assert told is not None
    assert told.layers[0].growth is None
    assert told.sentences == ()


def test_a_layer_that_had_no_norm_in_some_rounds_is_read_from_the_others() -> None:
    """None is a round without the layer, neither a zero nor a fault."""
    told = layer_story([header(0, {"a": (*STEADY, None, None, 20.0), "b": (None,) * 27})])
    assert told is not None
    by_name = {one.name: one for one in told.layers}
    assert by_name["a"].growth == 20.0
    assert (by_name["b"].points, by_name["b"].growth, by_name["b"].broke) == ((), None, None)


def test_the_part_with_most_rounds_is_read() -> None:
    """Rank 0 keeps every round, the others some; a part without norms is passed over."""
    told = layer_story([story.header(2), header(1, {"a": STEADY[:3]}), header(0, {"a": STEADY})])
    assert told is not None
    assert told.rank == 0
    assert layer_story([story.header(0)]) is None
