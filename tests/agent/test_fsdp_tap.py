"""The FSDP2 tap: unsharded gradients by name before the cast into the reduce buffer, and torch untouched otherwise."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
from torch import nn
from torch.distributed.fsdp import fully_shard
from watched import Watched, run_ranks

from sentinel.wire.messages import Check
from sentinel_agent import patching
from sentinel_agent.taps import fsdp

NAN = float("nan")


@pytest.fixture
def sharded(watched: Watched) -> Iterator[Callable[..., nn.Module]]:
    """Make a model sharded over this one rank, with the tap in place and known to the agent."""
    original = param_group.foreach_reduce
    fsdp.install(param_group, lambda: watched.agent.health)

    def make(**options: Any) -> nn.Module:
        model = fully_shard(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), **options)
        watched.agent.root_made(model)
        return model

    yield make
    param_group.foreach_reduce = original
    patching.restore()


def test_a_healthy_step_is_silent(watched: Watched, sharded: Callable[..., nn.Module]) -> None:
    """Sharded training with finite gradients makes rounds and no evidence."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert watched.steps == [0, 1, 2]
    assert watched.evidence() == []
    assert fsdp.current() is None


def test_a_switched_off_agent_is_not_asked(watched: Watched, sharded: Callable[..., nn.Module]) -> None:
    """After disable, and without an agent, reductions run as if nothing was patched."""
    model = sharded()
    watched.agent.health.active = False
    model(torch.tensor([[NAN, 1.0, 1.0]])).sum().backward()
    assert watched.evidence() == []
    watched.agent.health.active = True


def test_an_unknown_signature_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Another version of the private function is not touched, and one line says so."""
    module = types.SimpleNamespace(foreach_reduce=lambda other, arguments: None)
    original = module.foreach_reduce
    assert not fsdp.install(module, lambda: None)
    assert module.foreach_reduce is original
    printed = capsys.readouterr().err
    assert printed.startswith("sentinel: ")
    assert printed.count("\n") == 1


def test_the_function_is_put_back() -> None:
    """After restore torch's own function is in place."""
    original = param_group.foreach_reduce
    try:
        assert fsdp.install(param_group, lambda: None)
        assert fsdp.install(param_group, lambda: None)
        patching.restore()
        assert param_group.foreach_reduce is original
    finally:
        param_group.foreach_reduce = original


@pytest.mark.parametrize("world", [1, 2, 3])
def test_columns_are_found_under_padding(world: int) -> None:
    """Each parameter's dim 0 is padded to a multiple of the world; columns still lead to the right name."""
    gradients = [torch.zeros(5, 2), torch.zeros(1), torch.zeros(()), torch.zeros(0, 4), torch.full((2, 2), NAN)]
    widths = tuple(fsdp._width(gradient, world) for gradient in gradients)
    rows = torch.zeros(world, sum(widths))
    rows[-1, -1] = NAN
    found = fsdp.Unsharded(("a", "b", "c", "d", "e"), widths, None)
    assert list(found.nonfinite_columns(rows.flatten())) == ["e"]
    assert widths[3] == 0


def test_a_buffer_of_another_size_names_nobody() -> None:
    """If the layout is not the known one, no name is better than a wrong one."""
    assert list(fsdp.Unsharded(("a",), (3,), None).nonfinite_columns(torch.full((4,), NAN))) == []
    assert list(fsdp.Unsharded((), (), None).nonfinite_columns(torch.full((4,), NAN))) == []


def test_gradients_without_elements_have_no_finding() -> None:
    """An empty gradient is passed over by the look before a cast."""
    params = [types.SimpleNamespace(_param_fqn=name) for name in ("module.a", None)]
    seen = fsdp._look(params, [torch.ones(2), torch.zeros(0)], None, torch.float16)
    assert seen.names == ("a", "fsdp_param_1")
    assert seen.raw == (Check(2, 0, 0, 1.0), None)


RANKS = """
import json, sys
from pathlib import Path
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from sentinel.wire.messages import Phase
from sentinel_agent.taps import fsdp
from watched import watched_rank

watched = watched_rank(Path(sys.argv[1]))
fsdp.install(param_group, lambda: watched.agent.health)
rank = watched.agent.me.rank

def story(values, factor=1.0, reduce_dtype=None):
    watched.reports.clear()
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    watched.agent.root_made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(torch.tensor([values])).sum() * factor).backward()
    optimizer.step()
    wire = [
        {"names": e.parameters, "dtype": e.collective.dtype, "op": e.collective.op, "role": e.collective.role,
         "narrowed": e.collective.narrowed, "raw": e.collective.raw.nonfinite, "absmax": e.collective.raw.absmax}
        for e in watched.evidence(Phase.WIRE)
    ]
    return {"wire": wire, "reduced": len(watched.evidence(Phase.REDUCED)), "steps": watched.steps}

nan = [float("nan") if rank == 1 else 1.0, 1.0, 1.0]
told = {
    "healthy": story([1.0, 1.0, 1.0]),
    "nan": story(nan),
    "nan before a cast": story(nan, reduce_dtype=torch.bfloat16),
    "overflow": story([1.0, 1.0, 1.0], factor=1e6, reduce_dtype=torch.float16),
    "faults": watched.faults,
}
watched.agent.stop()
print(json.dumps(told))
"""


@pytest.mark.e2e
def test_two_ranks_name_the_gradients_behind_a_reduction(tmp_path: Path) -> None:
    """Over two ranks: names and raw gradients of each layer's reduce-scatter, with and without a cast, on the guilty rank only."""
    innocent, guilty = run_ranks(RANKS, tmp_path)
    assert innocent["faults"] == guilty["faults"] == {}
    for told in (innocent, guilty):
        assert told["healthy"]["wire"] == []
        assert told["healthy"]["steps"] == [0]
        names = {name for one in told["overflow"]["wire"] for name in one["names"]}
        assert names == set()
        assert told["overflow"]["wire"]
        assert all(one["narrowed"] and not one["raw"] and one["absmax"] > 65504 for one in told["overflow"]["wire"])
    for kind, narrowed in (("nan", False), ("nan before a cast", True)):
        assert innocent[kind]["wire"] == []
        assert innocent[kind]["reduced"] > 0
        assert {name for one in guilty[kind]["wire"] for name in one["names"]} == {"0.weight", "1.weight"}
        assert all(one["raw"] and one["narrowed"] is narrowed for one in guilty[kind]["wire"])
        assert {one["role"] for one in guilty[kind]["wire"]} == {"gradient"}
