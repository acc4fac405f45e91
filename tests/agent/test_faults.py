"""Faults happen where, when and how a plan says, towards the agent's looks in the right order, and nowhere else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from watched import Watched

from sentinel.wire.messages import Phase
from sentinel_agent.taps import wire
from sentinel_agent.testing.fault import MANTISSA_BITS, Fault, What, damage
from sentinel_agent.testing.faults import FaultPlan
from sentinel_agent.testing.injection import Injection

NAN, INF = float("nan"), float("inf")


@dataclass
class Spy:
    """Keeps copies of what it is shown: what a collective was given, and what it returned."""

    given: list[list[torch.Tensor]] = field(default_factory=list)
    returned: list[list[torch.Tensor]] = field(default_factory=list)

    def before(self, read: wire.Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copy the inputs."""
        call = read(args, kwargs)
        self.given.append([tensor.clone() for tensor in call.inputs])
        return call

    def after(self, token: Any, result: Any) -> None:
        """Copy the outputs."""
        wire.work_of(result).wait()
        self.returned.append([tensor.clone() for tensor in token.outputs])


class Rounds:
    """A spy inside an injection, and a count of rounds that the test advances."""

    def __init__(self) -> None:
        self.now = 0
        self.spy = Spy()

    def put_in(self, plan: FaultPlan, rank: int = 0) -> Injection:
        """Install the plan around the spy."""
        injection = plan.around(self.spy, rank, lambda: self.now)
        wire.install(injection)
        return injection

    def reduce(self, *values: float, dtype: torch.dtype = torch.float32) -> list[float]:
        """All-reduce these values over the group of one; what came back."""
        tensor = torch.tensor(values, dtype=dtype)
        dist.all_reduce(tensor)
        return tensor.tolist()


@pytest.fixture
def rounds(group: None) -> Iterator[Rounds]:
    """A process group of one with a spy on its collectives."""
    yield Rounds()
    wire.uninstall()


def test_wire_fault_is_seen_and_sent(rounds: Rounds) -> None:
    """A fault of the wire changes the tensor before the listener looks, once, in its round and collective only."""
    plan = FaultPlan().nan_at(rank=0, round=1, phase="wire", collective=1)
    rounds.put_in(plan)
    assert rounds.reduce(1.0, 2.0) == [1.0, 2.0]
    rounds.now = 1
    assert rounds.reduce(1.0, 2.0) == [1.0, 2.0]
    assert any(map(math.isnan, rounds.reduce(1.0, 2.0)))
    assert rounds.reduce(1.0, 2.0) == [1.0, 2.0]
    assert [bool(seen[0].isnan().any()) for seen in rounds.spy.given] == [False, False, True, False]
    plan.assert_fired()


@pytest.mark.parametrize(
    ("plan", "sent"),
    [
        (FaultPlan().lost_contribution_at(rank=0, round=1), [0.0, 0.0]),
        (FaultPlan().duplicated_contribution_at(rank=0, round=1), [6.0, 8.0]),
        (FaultPlan().stale_contribution_at(rank=0, round=1), [1.0, 2.0]),
    ],
)
def test_fault_of_the_way_is_sent_and_not_seen(rounds: Rounds, plan: FaultPlan, sent: list[float]) -> None:
    """A lost, doubled or stale contribution is what is reduced, while the listener saw the right one."""
    rounds.put_in(plan)
    assert rounds.reduce(1.0, 2.0) == [1.0, 2.0]
    rounds.now = 1
    assert rounds.reduce(3.0, 4.0) == sent
    assert rounds.spy.given[1][0].tolist() == [3.0, 4.0]
    assert rounds.spy.returned[1][0].tolist() == sent
    plan.assert_fired()


def test_reduced_fault_changes_the_result_before_it_is_seen(rounds: Rounds) -> None:
    """A fault of the result leaves the input alone and is what both the listener and the caller get."""
    plan = FaultPlan().scale_at(2.0, rank=None, round=0, phase="reduced")
    rounds.put_in(plan)
    assert rounds.reduce(1.0, 2.0) == [2.0, 4.0]
    assert rounds.spy.given[0][0].tolist() == [1.0, 2.0]
    assert rounds.spy.returned[0][0].tolist() == [2.0, 4.0]
    plan.assert_fired()


def test_reduced_fault_survives_every_wait_for_a_scatter(rounds: Rounds) -> None:
    """gloo copies a shard out again at each wait, and yet the fault stays in it."""
    plan = FaultPlan().inf_at(rank=0, round=1, phase="reduced")
    rounds.put_in(plan)
    shard, whole = torch.zeros(4), torch.arange(4.0)
    work = dist.reduce_scatter_single(shard, whole, async_op=True)
    work.wait()
    assert shard.tolist() == whole.tolist()
    rounds.now = 1
    work = dist.reduce_scatter_single(shard, whole, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    work.wait()
    assert int(shard.isinf().sum()) == int(rounds.spy.returned[1][0].isinf().sum()) == 1
    plan.assert_fired()


def test_numbers_and_flags_are_left_alone(rounds: Rounds) -> None:
    """Integers and single elements are no collective that a fault counts."""
    plan = FaultPlan().sign_at(rank=0, round=0, phase="wire")
    rounds.put_in(plan)
    assert rounds.reduce(1.0) == [1.0]
    assert rounds.reduce(1.0, 2.0, dtype=torch.int64) == [1.0, 2.0]
    assert rounds.reduce(1.0, 2.0) == [-1.0, -2.0]


def test_another_ranks_fault_does_not_happen_here(rounds: Rounds) -> None:
    """A fault of rank 1 changes nothing on rank 0, and does not count as missing there."""
    plan = FaultPlan().nan_at(rank=1, round=0, phase="wire")
    rounds.put_in(plan, rank=0)
    assert rounds.reduce(1.0, 2.0) == [1.0, 2.0]
    plan.assert_fired()


def test_a_fault_that_did_not_happen_is_told(rounds: Rounds) -> None:
    """``assert_fired`` names what was planned and never came true."""
    plan = FaultPlan().nan_at(rank=0, round=3, phase="wire")
    rounds.put_in(plan)
    rounds.reduce(1.0, 2.0)
    with pytest.raises(AssertionError, match="round=3"):
        plan.assert_fired()


def test_removed_faults_leave_the_listener(rounds: Rounds) -> None:
    """After ``remove`` the inner listener hears the tap again, and nothing is changed."""
    injection = rounds.put_in(FaultPlan().nan_at(rank=0, round=0, phase="wire"))
    injection.remove()
    assert rounds.reduce(1.0, 2.0) == [1.0, 2.0]
    assert len(rounds.spy.given) == 1


def _step(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model(torch.ones(2, 4)).sum().backward()


def test_raw_fault_is_in_the_gradient_of_the_parameter(rounds: Rounds) -> None:
    """A raw fault is in the named parameter's gradient, in its round's backward only."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    plan = FaultPlan().inf_at(rank=0, round=1, parameter="1.weight")
    rounds.put_in(plan).watch(model)
    found = []
    for rounds.now in range(3):
        model.zero_grad()
        _step(model)
        found.append([name for name, p in model.named_parameters() if p.grad is not None and p.grad.isinf().any()])
    assert found == [[], ["1.weight"], []]
    plan.assert_fired()


def test_raw_fault_reaches_a_sharded_parameter(rounds: Rounds) -> None:
    """Under fully_shard the fault is in the unsharded gradient, so that it reaches the reduce-scatter."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model[0])
    fully_shard(model)
    plan = FaultPlan().nan_at(rank=0, round=0, parameter="0.bias")
    rounds.put_in(plan).watch(model)
    _step(model)
    gradient = model[0].bias.grad
    assert gradient is not None
    assert int(gradient.to_local().isnan().sum()) == 1
    plan.assert_fired()


def test_weight_changes_before_the_forward(rounds: Rounds) -> None:
    """A changed weight is one element of the named parameter, changed before the round's forward."""
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    plan = FaultPlan().weights_at(0.5, rank=0, round=0, parameter="weight")
    rounds.put_in(plan).watch(model)
    _step(model)
    _step(model)
    difference = (model.weight.detach() - before).flatten().tolist()
    assert sorted(difference) == pytest.approx([0.0] * 7 + [0.5])
    plan.assert_fired()


def test_an_open_choice_is_the_same_for_equal_seeds(rounds: Rounds) -> None:
    """Which parameter and element is hit, where the plan leaves it open, follows from the seed."""
    hit = []
    for seed in (3, 3, 4, 5, 6):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        injection = rounds.put_in(FaultPlan(seed).nan_at(rank=0, round=0))
        injection.watch(model)
        _step(model)
        injection.remove()
        hit.append({n: p.grad.isnan().nonzero().tolist() for n, p in model.named_parameters() if p.grad is not None})
    assert hit[0] == hit[1]
    assert any(one != hit[0] for one in hit[2:])


@pytest.mark.parametrize("dtype", list(MANTISSA_BITS))
def test_bit_flip_stays_finite(dtype: torch.dtype) -> None:
    """A flipped bit changes exactly one element, whatever the strides, and leaves it finite."""
    for seed in range(50):
        tensor = torch.full((3, 5), 1.5, dtype=dtype).t()
        fault = Fault(What.BIT_FLIP, rank=0, round=0, phase=Phase.WIRE)
        damage(fault, tensor, random.Random(seed))
        assert int((tensor != 1.5).sum()) == 1, f"seed {seed}"
        assert tensor.isfinite().all(), f"seed {seed}"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: FaultPlan().nan_at(rank=0, round=0, phase="loss"),
        lambda: FaultPlan().lost_contribution_at(rank=0, round=0, phase="raw"),
        lambda: FaultPlan().nan_at(rank=0, round=0, phase="wire", parameter="0.weight"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(wrong: Callable[[], FaultPlan]) -> None:
    """A fault in a phase where it cannot happen, or a parameter where only collectives are known, is a ValueError."""
    with pytest.raises(ValueError, match=r"no fault|knows collectives"):
        wrong()


@pytest.mark.parametrize(
    ("phase", "seen"),
    [("raw", [Phase.WIRE, Phase.REDUCED]), ("wire", [Phase.WIRE, Phase.REDUCED]), ("reduced", [Phase.REDUCED])],
)
def test_the_agent_sees_each_phase_as_such(watched: Watched, phase: str, seen: list[Phase]) -> None:
    """Around a real agent: a NaN of each phase is first seen on that side of the collective, in the round planned."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = FaultPlan().nan_at(rank=0, round=1, phase=phase)
    injection = plan.install(watched.agent)
    injection.watch(model)
    for _ in range(2):
        optimizer.zero_grad()
        _step(model)
        optimizer.step()
    injection.remove()
    plan.assert_fired()
    found = watched.evidence(Phase.WIRE, Phase.REDUCED)
    assert [e.phase for e in found] == seen
    assert {e.round for e in found} == {1}
    raw = [e.collective.raw.nonfinite for e in found if e.collective and e.collective.raw is not None]
    assert raw[:1] == ([] if phase == "reduced" else [phase == "raw"])
