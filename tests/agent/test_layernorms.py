"""Gradient norms by layer: who keeps them, in how many rounds, by which names, and what growth is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched import Watched

from sentinel_agent import bucketlayout
from sentinel_agent.check import Checker, check_one
from sentinel_agent.layernorms import (
    CLOSELY_EVERY,
    KEPT_ROUNDS,
    MAX_LAYERS,
    MEMORY,
    OTHERS_EVERY,
    WARM_UP,
    Growth,
    LayerNorms,
)

NAN = float("nan")


def healthy(norms: LayerNorms, rounds: int, start: int = 0) -> None:
    """Rounds in which two layers have gradients of norm 5 and 1."""
    for number in range(start, start + rounds):
        norms.note(["down.1.weight", "down.1.bias", "head.weight"], [4.0, 3.0, 1.0])
        norms.close(number, None)


def test_a_layer_is_the_module_that_owns_its_parameters() -> None:
    """Weight and bias are one layer, whose norm is that of both; the loss scale is taken out."""
    norms = LayerNorms(0)
    norms.note(["down.1.weight", "down.1.bias", "gain"], [8.0, 6.0, 2.0])
    norms.close(3, 2.0)
    table = norms.table()
    assert table is not None
    assert table.rounds == (3,)
    assert table.layers == {"down.1": (5.0,), "gain": (1.0,)}


def test_a_later_backward_replaces_an_earlier_one() -> None:
    """Gradients add up over the micro-batches of a round: the last one's norm is the round's."""
    norms = LayerNorms(0)
    norms.note(["a.w"], [1.0])
    norms.note(["a.w"], [3.0])
    norms.close(0, None)
    table = norms.table()
    assert table is not None
    assert table.layers == {"a": (3.0,)}


def test_only_the_last_rounds_are_kept() -> None:
    """A run of any length keeps as many rounds, and a layer that was not seen in one has no norm there."""
    norms = LayerNorms(0)
    healthy(norms, KEPT_ROUNDS + 5)
    norms.note(["head.weight"], [1.0])
    norms.close(KEPT_ROUNDS + 5, None)
    table = norms.table()
    assert table is not None
    assert table.rounds == tuple(range(6, KEPT_ROUNDS + 6))
    assert table.layers["down.1"][-2:] == (5.0, None)


def test_a_layer_that_grows_is_named() -> None:
    """Growth is the norm over the layer's own usual one, known after a while; a layer that is always large has not grown."""
    norms = LayerNorms(0)
    healthy(norms, WARM_UP - 1)
    norms.note(["down.1.weight", "head.weight"], [5.0, 100.0])
    assert norms.close(WARM_UP - 1, None) is None
    healthy(norms, 20, WARM_UP)
    norms.note(["down.1.weight", "head.weight"], [5.0, 50.0])
    growth = norms.close(50, None)
    assert growth is not None
    assert growth.layer == "head"
    assert 30 < growth.factor < 60


@pytest.mark.parametrize("odd", [0.0, math.inf, NAN])
def test_what_is_not_a_size_teaches_nothing(odd: float) -> None:
    """Zero, infinite and undefined norms are kept as they are and change no layer's usual norm."""
    norms = LayerNorms(0)
    healthy(norms, 30)
    norms.note(["head.weight"], [odd])
    assert norms.close(30, None) is None
    norms.note(["head.weight"], [1.0])
    growth = norms.close(31, None)
    assert growth is not None
    assert growth.factor == pytest.approx(1.0)


def test_very_many_layers_are_taken_together() -> None:
    """A model of a thousand modules is told by the modules above them."""
    names = [f"blocks.{block}.part{part}.weight" for block in range(40) for part in range(25)]
    norms = LayerNorms(0)
    norms.note(names, [1.0] * len(names))
    norms.close(0, None)
    table = norms.table()
    assert table is not None
    assert len(table.layers) == 40 <= MAX_LAYERS
    assert table.layers["blocks.7"] == (5.0,)


def test_rank_0_keeps_every_round_and_the_others_some() -> None:
    """What one rank keeps of reduced gradients, all could."""
    assert all(LayerNorms(0).wanted(number) for number in range(40))
    assert [number for number in range(40) if LayerNorms(3).wanted(number)] == [0, OTHERS_EVERY, 2 * OTHERS_EVERY]


def plain(norms: LayerNorms, number: int, head: float, whole: float) -> Growth | None:
    """A round in which two layers have gradients, noted if it is one to look closely."""
    if norms.closely(number):
        norms.note(["body.weight", "head.weight"], [1.0, head])
    return norms.close(number, None, whole)


def test_buckets_are_taken_apart_in_the_first_rounds_and_then_in_some() -> None:
    """Steady gradients are looked at layer by layer until their usual size is known, then in one round of four."""
    norms = LayerNorms(0)
    for number in range(60):
        plain(norms, number, 1.0, 1.5)
    table = norms.table()
    assert table is not None
    assert table.rounds == (*range(MEMORY), *range(MEMORY, 60, CLOSELY_EVERY))


def test_while_gradients_grow_every_round_is_looked_at() -> None:
    """When the norm of all is twice the usual one, the next rounds are taken apart, whichever they are, until it is back."""
    norms = LayerNorms(0)
    for number in range(41):
        plain(norms, number, 1.0, 1.5)
    assert not norms.closely(41)
    plain(norms, 41, 4.0, 3.5)
    assert norms.closely(42)
    growth = plain(norms, 42, 8.0, 8.5)
    assert growth is not None
    assert growth.layer == "head"
    assert growth.factor == pytest.approx(8.0)
    assert norms.closely(43)
    plain(norms, 43, 1.0, 1.5)
    assert not norms.closely(45)


def test_a_layer_that_grows_alone_is_watched() -> None:
    """One small layer moves the norm of all by nothing: once a look has found it grown, every round is looked at."""
    norms = LayerNorms(0)
    for number in range(44):
        plain(norms, number, 0.01, 1.0)
    plain(norms, 44, 0.05, 1.0)
    assert norms.closely(45)
    plain(norms, 45, 0.01, 1.0)
    assert not norms.closely(46)


def test_growth_stays_told_between_two_looks() -> None:
    """A dashboard sees the last look's growth in a round that was none, and nothing where a look came back empty."""
    norms = LayerNorms(0)
    for number in range(44):
        plain(norms, number, 1.0, 1.5)
    looked = plain(norms, 44, 1.5, 1.9)
    assert looked is not None
    assert plain(norms, 45, 1.0, 1.5) == looked
    assert norms.close(48, None, 1.5) is None


@pytest.mark.parametrize("whole", [0.0, math.inf, NAN])
def test_a_whole_that_is_not_known_grows_nothing(whole: float) -> None:
    """Results that nobody could look at, or that overflow, make no round one to look closely."""
    norms = LayerNorms(0)
    for number in range(41):
        plain(norms, number, 1.0, 1.5)
    plain(norms, 41, 1.0, whole)
    assert not norms.closely(42)


def test_the_loss_scale_is_no_growth() -> None:
    """A scaler that doubles the loss doubles every gradient: what is compared is unscaled."""
    norms = LayerNorms(0)
    for number in range(41):
        norms.note(["head.weight"], [8.0])
        norms.close(number, 8.0, 8.0)
    norms.close(41, 32.0, 32.0)
    assert not norms.closely(42)


def test_other_ranks_say_nothing_between_their_rounds() -> None:
    """A rank that keeps one round in sixteen tells no growth in the others, however old its last look is."""
    norms = LayerNorms(3)
    for number in range(0, 20 * OTHERS_EVERY, OTHERS_EVERY):
        norms.note(["head.weight"], [1.0])
        last = norms.close(number, None, 1.0)
    assert last is not None
    assert norms.close(20 * OTHERS_EVERY - 1, None, 9.0) is None
    assert norms.closely(20 * OTHERS_EVERY)
    assert not norms.closely(20 * OTHERS_EVERY + 1)


def train(model: nn.Module, rounds: int, rows: Callable[[int], torch.Tensor]) -> None:
    """Plain training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(rounds):
        optimizer.zero_grad()
        model(rows(number)).square().mean().backward()
        optimizer.step()


def deep(width: int) -> nn.Sequential:
    """Three layers whose buckets are large for the quick look if ``width`` is."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1))


@pytest.mark.parametrize("width", [8, 200], ids=["small buckets", "large buckets"])
@pytest.mark.parametrize("view", [False, True], ids=["copied", "bucket views"])
def test_ddp_tells_every_layer_in_every_round(watched: Watched, width: int, view: bool) -> None:
    """Once DDP has rebuilt its buckets, the check of a bucket tells each layer's norm, which is that of its gradients."""
    model = DistributedDataParallel(deep(width), bucket_cap_mb=0.1, gradient_as_bucket_view=view)
    train(model, 8, lambda _number: torch.randn(4, width))
    table = watched.agent.ledger.reductions.norms.table()
    assert table is not None
    assert table.rounds[-5:] == (3, 4, 5, 6, 7)
    for number, layer in enumerate(model.module):
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        assert table.layers[str(number)][-1] == pytest.approx(norm, rel=1e-4)


def test_a_layout_that_does_not_fit_is_not_believed(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the parameters DDP is said to have put into a bucket are others, their values differ, and nothing is learnt."""
    original = bucketlayout._buckets

    def turned(module: DistributedDataParallel) -> list[list[nn.Parameter]]:
        return [bucket[::-1] for bucket in original(module)]

    monkeypatch.setattr(bucketlayout, "_buckets", turned)
    train(DistributedDataParallel(deep(200), bucket_cap_mb=0.1), 6, lambda _number: torch.randn(4, 200))
    table = watched.agent.ledger.reductions.norms.table()
    assert table is not None
    assert table.rounds == (0,)  # the look of its own, in one round of sixteen


def test_a_loop_of_its_own_tells_what_it_reduces(watched: Watched) -> None:
    """Gradients that a script reduces one by one have their norms by name."""
    model = deep(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    table = watched.agent.ledger.reductions.norms.table()
    assert table is not None
    assert table.rounds == (0, 1, 2)
    assert set(table.layers) == {"0", "1", "2"}


def test_the_round_of_the_fault_has_its_norms(watched: Watched) -> None:
    """Where something became nonfinite the layers are looked at once more: those behind it are finite, those before are not."""
    model = DistributedDataParallel(deep(200), bucket_cap_mb=0.1)

    def rows(number: int) -> torch.Tensor:
        if number == 6:
            model.module[1].register_full_backward_hook(lambda _module, given, _got: (given[0] * NAN,))
        return torch.randn(4, 200)

    train(model, 7, rows)
    table = watched.agent.ledger.reductions.norms.table()
    assert table is not None
    assert table.rounds[-1] == 6
    assert [math.isfinite(table.layers[name][-1] or 0.0) for name in "012"] == [False, True, True]


def test_the_growth_of_a_layer_reaches_the_coordinator(watched: Watched) -> None:
    """The record of a round names the layer that has grown most, and how far."""
    model = DistributedDataParallel(deep(8))
    train(model, 24, lambda number: torch.ones(4, 8) * (100.0 if number == 23 else 1.0))
    last = watched.rounds[-1]
    assert last.layer in ("0", "1", "2")
    assert last.layer_growth is not None
    assert last.layer_growth > 30
    assert all(one.layer_growth is None for one in watched.rounds[:WARM_UP])


def test_sparse_gradients_are_left_out(watched: Watched) -> None:
    """An embedding with sparse gradients, which DDP reduces apart, disturbs nothing."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 200), nn.Linear(200, 200))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randint(0, 50, (4,))).square().mean().backward()
        optimizer.step()
    table = watched.agent.ledger.reductions.norms.table()
    assert table is not None
    assert {"1", "2"} <= set(table.layers)


def test_unused_parameters_are_looked_at_now_and_then(watched: Watched) -> None:
    """Where DDP never rebuilds its buckets nobody says what lies where: one look of its own in sixteen rounds."""
    model = DistributedDataParallel(deep(8), find_unused_parameters=True)
    train(model, 18, lambda _number: torch.randn(4, 8))
    table = watched.agent.ledger.reductions.norms.table()
    assert table is not None
    assert table.rounds == (0, 16)


def test_norms_of_an_unknown_scale_are_left_out() -> None:
    """A loop with a GradScaler that leaves without its step has gradients scaled by nobody knows what: no growth is made of it."""
    norms = LayerNorms(0)
    for number in range(20):
        norms.note(["a.w"], [65536.0])
        norms.close(number, 65536.0)
    norms.note(["a.w"], [65536.0])
    assert norms.close(20, None) is None
    table = norms.table()
    assert table is not None
    assert table.rounds[-1] == 19


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 200])
def test_models_of_other_dtypes_disturb_nothing(watched: Watched, dtype: torch.dtype, width: int) -> None:
    """Double and bfloat16 models are trained without a fault of ours (which the fixture asserts)."""
    model = DistributedDataParallel(deep(width).to(dtype), bucket_cap_mb=0.1)
    train(model, 8, lambda _number: torch.randn(4, width, dtype=dtype))
    assert watched.agent.health.active


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_all_pieces_is_the_norm_of_the_whole(dtype: torch.dtype) -> None:
    """Rank 0 reads a bucket layer by layer, the others as a whole, and ranks compare what they found."""
    tensor = torch.randn(40_000).to(dtype)
    looked = Checker().check_pieces(tensor, (10_000, 29_000, 1_000))
    assert looked is not None
    assert looked[0].absmax == pytest.approx(check_one(tensor).absmax, rel=1e-5)


def test_a_gradient_that_broke_has_no_norm(watched: Watched) -> None:
    """In a loop of its own, a gradient of NaN is noted as that, and not as the largest finite element."""
    model = nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 200) * (NAN if number == 2 else 1.0)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    table = watched.agent.ledger.reductions.norms.table()
    assert table is not None
    assert math.isnan(next(iter(table.layers.values()))[-1] or 0.0)
