"""The optimizer tap: every step is heard before it happens, with the gradients it will use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sentinel_agent import patching
from sentinel_agent.errors import Health
from sentinel_agent.taps import optimizer as tap


class Heard:
    """What the tap told."""

    def __init__(self) -> None:
        self.health = Health(0, lambda _reason: None)
        self.steps: list[torch.optim.Optimizer] = []
        self.gradients: list[float | None] = []
        self.made: list[torch.optim.Optimizer] = []

    def step(self, optimizer: torch.optim.Optimizer, again: bool) -> None:
        """Note a step and the gradient it will use."""
        self.steps.append(optimizer)
        gradient = optimizer.param_groups[0]["params"][0].grad
        self.gradients.append(None if gradient is None else gradient.sum().item())


@pytest.fixture
def heard() -> Iterator[Heard]:
    """A listener on every optimizer of the process."""
    heard = Heard()
    tap.install(heard.step, heard.made.append, heard.health)
    yield heard
    tap.uninstall()
    patching.restore()


class OfTheUser(torch.optim.Optimizer):
    """A subclass with a step of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Move each parameter a little."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= 0.1 * parameter.grad
        return loss


def _parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


MAKERS = {
    "sgd": lambda p: torch.optim.SGD([p], lr=0.1),
    "adamw": lambda p: torch.optim.AdamW([p]),
    "fused": lambda p: torch.optim.AdamW([p], fused=True),
    "of the user": lambda p: OfTheUser([p]),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_step_is_heard_before_it_is_made(heard: Heard, make: Any) -> None:
    """Construction and each step are told once; at that moment the parameter has not moved."""
    parameter = _parameter()
    optimizer = make(parameter)
    moved: list[bool] = []
    heard.steps.clear()
    optimizer.step()
    moved.append(not torch.equal(parameter, torch.ones(2)))
    optimizer.step()
    assert heard.made == [optimizer]
    assert heard.steps == [optimizer, optimizer]
    assert heard.gradients == [2.0, 2.0]
    assert moved == [True]


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("make", [MAKERS["sgd"], MAKERS["of the user"]], ids=["sgd", "of the user"])
def test_a_closure_is_heard_when_its_gradients_are_there(heard: Heard, make: Any, keyword: bool) -> None:
    """Backward runs inside the closure: what is told is the gradient that it left, and its result goes back to the caller."""
    parameter = _parameter()
    optimizer = make(parameter)

    def closure() -> float:
        parameter.grad.fill_(3.0)  # type: ignore[union-attr]
        return 0.25

    loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    assert loss == 0.25
    assert heard.gradients == [6.0]
    assert parameter.tolist() == pytest.approx([0.7, 0.7])


def test_the_evaluations_of_one_step_are_told_apart() -> None:
    """From its second evaluation within one step on, a closure is heard as one that runs again."""
    told: list[bool] = []
    tap.install(lambda _optimizer, again: told.append(again), lambda _made: None, Health(0, lambda _reason: None))
    try:
        parameter = _parameter()
        optimizer = torch.optim.LBFGS([parameter], max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (parameter - 3).pow(4).sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        first = len(told)
        optimizer.step(closure)  # type: ignore[arg-type]
    finally:
        tap.uninstall()
        patching.restore()
    assert first > 1
    assert told == [i not in (0, first) for i in range(len(told))]


def test_an_error_in_the_closure_is_the_user_s(heard: Heard) -> None:
    """A closure that raises raises, and no step was heard."""

    def closure() -> float:
        raise KeyError("of its own")

    with pytest.raises(KeyError, match="of its own"):
        torch.optim.SGD([_parameter()], lr=0.1).step(closure)  # type: ignore[arg-type]
    assert heard.steps == []
    assert not heard.health.faults


def test_faults_of_the_listener_do_not_stop_the_step() -> None:
    """The parameter moves and the optimizer is made whatever the listener does; faults are counted by place."""
    health = Health(0, lambda _reason: None)

    def broken(*_args: Any) -> None:
        raise ValueError("no such thing")

    tap.install(broken, broken, health)
    try:
        parameter = _parameter()
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        optimizer.step()
        assert optimizer.step(lambda: 1.0) == 1.0
    finally:
        tap.uninstall()
        patching.restore()
    assert parameter.tolist() == [0.0, 0.0]
    assert health.faults == {"optimizer_made:ValueError": 1, "optimizer:ValueError": 2}


def test_uninstall_leaves_torch_as_it_was() -> None:
    """Hook and constructor are gone, the constructor being the identical function."""
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    hooks, constructor = dict(_global_optimizer_pre_hooks), torch.optim.Optimizer.__init__
    heard = Heard()
    tap.install(heard.step, heard.made.append, heard.health)
    assert dict(_global_optimizer_pre_hooks) != hooks
    tap.uninstall()
    patching.restore()
    assert dict(_global_optimizer_pre_hooks) == hooks
    assert torch.optim.Optimizer.__init__ is constructor


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_step_is_heard(heard: Heard) -> None:
    """Compiling the optimizer, as torch's recipes do, does not stop the clock."""
    parameter = _parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    step()
    step()
    assert len(heard.steps) == 2
    assert parameter.tolist() == pytest.approx([0.8, 0.8])
