"""A step without its gradients does nothing at all, and everything is where it was afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sentinel_agent.taps.withheld import Withheld

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd momentum decay": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps),
    "adafactor": lambda ps: torch.optim.Adafactor(ps),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.9),
    "nadam": lambda ps: torch.optim.NAdam(ps),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, max_iter=2),
}


def backward(model: nn.Module, value: float = 1.0) -> torch.Tensor:
    """Fresh gradients."""
    model.zero_grad()
    loss = model(torch.full((2, 3), value)).square().mean()
    loss.backward()
    return loss


def step(optimizer: torch.optim.Optimizer, model: nn.Module, value: float = 1.0) -> None:
    """One step with new gradients; LBFGS makes its own."""
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(lambda: float(backward(model, value).detach()))  # type: ignore[no-untyped-call]
    else:
        backward(model, value)
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Parameters and optimizer state, copied."""
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


def same(one: Any, other: Any) -> bool:
    """Bit equality of nested states."""
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_withheld_step_changes_nothing(name: str, steps_before: int) -> None:
    """Parameters and state are untouched, before the first real step (no momentum is born) and after some."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for _ in range(steps_before):
        step(optimizer, model)
    before, withheld = state_of(model, optimizer), Withheld()
    backward(model, float("nan"))
    withheld.arm(optimizer)
    if name == "lbfgs":
        gradients = optimizer.param_groups[0]["params"][0].grad
        optimizer.step(lambda: gradients.sum())  # type: ignore[no-untyped-call]
        assert same(before[0], model.state_dict())  # its count of evaluations is not state that a step uses
    else:
        optimizer.step()
        assert same(before, state_of(model, optimizer))
    assert all(p.grad is not None and p.grad.isnan().any() for p in model.parameters())


def test_the_next_step_is_as_if_nothing_had_been() -> None:
    """Only one call is left out: the one after it is what it would have been."""
    ends = []
    for leave_out in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer, withheld = torch.optim.AdamW(model.parameters()), Withheld()
        step(optimizer, model)
        if leave_out:
            backward(model, float("nan"))
            withheld.arm(optimizer)
            optimizer.step()
        step(optimizer, model, 2.0)
        ends.append(state_of(model, optimizer))
    assert same(*ends)


def test_the_user_s_hooks_find_their_gradients() -> None:
    """Hooks of the user's own, before and after the step, old and new, see gradients and not None."""
    model = nn.Linear(3, 2)
    optimizer, withheld, seen = torch.optim.SGD(model.parameters(), lr=0.1), Withheld(), []

    def look(stepping: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        seen.append(all(p.grad is not None for p in stepping.param_groups[0]["params"]))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    for _ in range(2):
        backward(model)
        withheld.arm(optimizer)
        optimizer.step()
        optimizer.register_step_pre_hook(look)
    assert seen == [True] * 5


def test_gradients_come_back_after_a_step_that_raised() -> None:
    """An exception out of the step leaves the gradients away only until they are given back."""
    model = nn.Linear(3, 2)
    optimizer, withheld = torch.optim.SGD(model.parameters(), lr=0.1), Withheld()
    backward(model)
    withheld.take(optimizer)
    assert all(p.grad is None for p in model.parameters())
    assert withheld.give_back() == 2
    assert all(p.grad is not None for p in model.parameters())
    assert withheld.give_back() == 0


def test_new_gradients_are_not_overwritten() -> None:
    """What was made meanwhile stays: gradients are given back only where there is none."""
    model = nn.Linear(3, 2)
    optimizer, withheld = torch.optim.SGD(model.parameters(), lr=0.1), Withheld()
    backward(model)
    withheld.take(optimizer)
    model.weight.grad = torch.zeros(2, 3)
    withheld.give_back(optimizer)
    assert not model.weight.grad.any()
    assert model.bias.grad is not None


def test_uninstalled_hooks_are_gone() -> None:
    """After uninstalling, the optimizer has no hook of ours."""
    model = nn.Linear(3, 2)
    optimizer, withheld = torch.optim.SGD(model.parameters(), lr=0.1), Withheld()
    withheld.arm(optimizer)
    withheld.uninstall()
    hooks = vars(optimizer)
    assert not hooks["_optimizer_step_pre_hooks"]
    assert not hooks["_optimizer_step_post_hooks"]
