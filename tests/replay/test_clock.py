"""The clock counts rounds as the ledger does."""

from __future__ import annotations

import torch

from sentinel_agent.naming import Naming
from sentinel_agent.replay.clock import Clock
from sentinel_agent.scan import Scan


def clock_of(parameter: torch.nn.Parameter) -> tuple[Clock, list[tuple[int, str]], torch.optim.Optimizer]:
    """A clock over one parameter's optimizer, and what it told."""
    naming = Naming()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    naming.add_optimizer(optimizer)
    told: list[tuple[int, str]] = []
    return Clock(Scan(naming), lambda number, why: told.append((number, why))), told, optimizer


def backward(clock: Clock, parameter: torch.nn.Parameter) -> None:
    """One backward, as the hooks tell it."""
    clock.backward_begins()
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    clock.backward_ended()


def test_a_step_closes_the_round_once() -> None:
    """Accumulated backwards are one round; a step without a backward before it is none."""
    weight = torch.nn.Parameter(torch.ones(3))
    clock, told, _ = clock_of(weight)
    backward(clock, weight)
    backward(clock, weight)
    clock.stepped("step")
    clock.stepped("step")
    assert told == [(0, "step")]
    assert clock.round == 1


def test_cleared_gradients_close_it_in_hindsight() -> None:
    """A step that the user left out is noticed when the next backward begins and the gradients are gone."""
    weight = torch.nn.Parameter(torch.ones(3))
    clock, told, optimizer = clock_of(weight)
    backward(clock, weight)
    optimizer.zero_grad()
    backward(clock, weight)
    assert told == [(0, "gradients were cleared without a step")]


def test_a_jump_enters_a_round_at_its_beginning() -> None:
    """After a jump the next step closes the round that was jumped to."""
    weight = torch.nn.Parameter(torch.ones(3))
    clock, told, _ = clock_of(weight)
    backward(clock, weight)
    clock.jump(7)
    clock.stepped("step")
    assert told == []
    backward(clock, weight)
    clock.stepped("step")
    assert told == [(7, "step")]
