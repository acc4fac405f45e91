"""What a forward gathers from all ranks: looked at as it is given, and only there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from watched import Watched

from sentinel.wire.messages import Evidence, Phase, Role

NAN = torch.tensor([1.0, float("nan")])


def gather(tensor: torch.Tensor) -> None:
    """As a contrastive loss gathers embeddings."""
    dist.all_gather([torch.empty_like(tensor)], tensor)


def given(watched: Watched) -> list[Evidence]:
    """What was latched of the wire."""
    return watched.evidence(Phase.WIRE)


def test_nan_given_to_a_gathering_of_the_forward_is_told(watched: Watched) -> None:
    """As an activation's, numbered apart from the reductions of its group."""
    gather(torch.ones(2))
    gather(NAN)
    (seen,) = given(watched)
    assert seen.collective is not None
    assert (seen.collective.op, seen.collective.role) == ("allgather_", Role.ACTIVATION)
    assert (seen.collective.reduce_op, seen.collective.index) == ("GATHER", 1)
    assert seen.collective.group.endswith(" gather")
    assert seen.check.nan == 1


@pytest.mark.parametrize(
    "tensor", [torch.tensor([1, 2]), torch.empty(0), torch.ones(3)], ids=["whole", "empty", "finite"]
)
def test_what_cannot_be_wrong_is_not_told(watched: Watched, tensor: torch.Tensor) -> None:
    """Integers, nothing at all, and finite values."""
    gather(tensor)
    assert given(watched) == []


def test_what_is_gathered_after_backward_is_a_metric(watched: Watched) -> None:
    """Between a backward and the next forward nothing of a gradient can come of it; from the next forward on it can."""
    model = nn.Linear(2, 1)
    watched.agent.root_made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    gather(NAN)
    optimizer.step()
    assert given(watched) == []
    output = model(torch.ones(1, 2)).sum()
    gather(NAN)
    output.backward()
    assert len(given(watched)) == 1
