"""Second moments of optimizers: inf there, from finite gradients, stops weights for good."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from watched import Watched

from sentinel.wire.messages import SECOND_MOMENT, Evidence, Phase
from sentinel_agent import moments

HUGE = 1e22
MAKES: dict[str, Any] = {
    "exp_avg_sq": torch.optim.AdamW,
    "max_exp_avg_sq": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "square_avg": torch.optim.RMSprop,
    "sum": torch.optim.Adagrad,
}


def train(watched: Watched, factors: list[float], make: Any = torch.optim.Adam, dtype: Any = torch.float32) -> None:
    """A loop that averages its gradients itself; its loss is multiplied by each step's factor."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(dtype)
    watched.agent.root_made(model)
    optimizer = make(model.parameters())
    for factor in factors:
        optimizer.zero_grad()
        (model(torch.ones(2, 4, dtype=dtype)).sum() * factor).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


def told(watched: Watched) -> list[Evidence]:
    """What was told of second moments."""
    return [one for one in watched.evidence(Phase.CLIP) if one.note == SECOND_MOMENT]


@pytest.mark.parametrize("key", MAKES)
def test_squares_that_overflow_are_told_once_with_their_step(watched: Watched, key: str) -> None:
    """Whatever the optimizer calls them; the names of the weights that they stop are told, and only the first time."""
    train(watched, [1.0, HUGE, 1.0, HUGE, 1.0], MAKES[key])
    [one] = told(watched)
    assert (one.step, one.parameters, one.parameters_total) == (1, ("weight", "bias"), 2)
    assert one.check.inf == 5
    assert one.check.nan == 0


def test_those_of_the_last_step_are_told_too(watched: Watched) -> None:
    """Though no round follows."""
    train(watched, [1.0, HUGE])
    assert [one.step for one in told(watched)] == [1]


def test_half_precision_overflows_much_sooner(watched: Watched) -> None:
    """Gradients of a few thousand are enough in float16."""
    train(watched, [1.0, 8000.0], MAKES["square_avg"], torch.float16)
    assert [one.step for one in told(watched)] == [1]


@pytest.mark.parametrize("factor", [1.0, 1e15, float("inf")])
def test_squares_that_fit_or_gradients_that_do_not_are_no_such_fault(watched: Watched, factor: float) -> None:
    """Large gradients alone stop nothing; nonfinite ones are told as what they are."""
    train(watched, [1.0, factor, 1.0])
    assert told(watched) == []


def test_sgd_keeps_no_squares(watched: Watched) -> None:
    """Its momentum may be as large as the gradients are."""
    train(watched, [1.0, HUGE], lambda parameters: torch.optim.SGD(parameters, lr=1e-30, momentum=0.9))
    assert told(watched) == []


def test_looks_have_an_end(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that stay large, as a loss scale can keep them, do not have the state read for ever."""
    looks: list[Any] = []
    monkeypatch.setattr(moments, "_overflowed", lambda optimizer: looks.append(optimizer) or [])
    train(watched, [HUGE] * (moments.MAX_LOOKS + 6))
    assert len(looks) == moments.MAX_LOOKS


def test_small_gradients_cost_no_look(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is not read while no square can overflow."""
    looks: list[Any] = []
    monkeypatch.setattr(moments, "_overflowed", lambda optimizer: looks.append(optimizer) or [])
    train(watched, [1.0, 1e18])
    assert looks == []
