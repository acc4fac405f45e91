"""What a forward gathers from all ranks: looked at as it is given, and only there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from watched import Watched

from sentinel.wire.messages import Phase, Role

NAN = torch.tensor([1.0, float("nan")])


def gather(tensor: torch.Tensor) -> None:
    """As a contrastive loss gathers embeddings."""
    dist.all_gather([torch.empty_like(tensor)], tensor)


def model_of(watched: Watched) -> nn.Module:
    """A model that is watched."""
    model = nn.Linear(2, 1)
    watched.agent.root_made(model)
    return model


def step(model: nn.Module, tensor: torch.Tensor, *, breaks: bool) -> None:
    """A round whose forward gathers ``tensor``, and whose loss is nonfinite if it ``breaks``."""
    output = model(torch.ones(1, 2)).sum()
    gather(torch.ones(2))
    gather(tensor)
    (output * float("nan") if breaks else output).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_nan_given_to_a_gathering_is_told_before_what_came_of_it(watched: Watched) -> None:
    """As an activation's, numbered apart from the reductions of its group, and before the loss that it spoilt."""
    step(model_of(watched), NAN, breaks=True)
    seen, loss = watched.evidence(Phase.WIRE, Phase.LOSS)
    assert seen.collective is not None
    assert (seen.collective.op, seen.collective.role) == ("allgather_", Role.ACTIVATION)
    assert (seen.collective.reduce_op, seen.collective.index) == ("GATHER", 1)
    assert seen.collective.group.endswith(" gather")
    assert (seen.check.nan, seen.order, loss.phase, loss.order) == (1, 0, Phase.LOSS, 1)


@pytest.mark.parametrize("tensor", [torch.tensor([1, 2]), torch.empty(0), torch.ones(3), torch.tensor([float("-inf")])])
def test_what_is_not_nan_is_not_told(watched: Watched, tensor: torch.Tensor) -> None:
    """Integers, nothing at all, finite values, and the infinities of a mask."""
    step(model_of(watched), tensor, breaks=True)
    assert watched.evidence(Phase.WIRE) == []


def test_nan_that_spoils_nothing_is_not_told(watched: Watched) -> None:
    """What is padded with NaN on purpose, round by round, raises no suspicion."""
    model = model_of(watched)
    for _ in range(3):
        step(model, NAN, breaks=False)
    assert [r.evidence for r in watched.rounds] == [0, 0, 0]


def test_what_is_gathered_after_backward_is_a_metric(watched: Watched) -> None:
    """Nothing of a gradient can come of it, not in the next round either."""
    model = model_of(watched)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    gather(NAN)
    optimizer.step()
    gather(NAN)
    step(model, torch.ones(2), breaks=True)
    assert watched.evidence(Phase.WIRE) == []
