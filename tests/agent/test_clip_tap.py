"""The clip tap: before gradients are clipped or unscaled, outstanding checks are finished; clipping itself is torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sentinel_agent import patching
from sentinel_agent.errors import Health
from sentinel_agent.taps import clip as tap


def _parameter(gradient: float = 3.0) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), gradient)
    return parameter


def _unscale(parameter: nn.Parameter) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))


def _install(listener: Callable[..., None], health: Health) -> None:
    tap.install(listener, lambda _parameters, _norm: None, listener, lambda _optimizer: None, health)


WRITERS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "norm by module": lambda p: nn.utils.clip_grad.clip_grad_norm_(iter([p]), 1.0),
    "value": lambda p: nn.utils.clip_grad_value_([p], 1.0),
    "unscale": _unscale,
}


@pytest.fixture
def parameter() -> nn.Parameter:
    """A parameter with a gradient of threes."""
    return _parameter()


@pytest.fixture
def heard(parameter: nn.Parameter) -> Iterator[list[float]]:
    """The first element of the parameter's gradient at each call of the listener."""
    seen: list[float] = []
    _install(lambda *_: seen.append(parameter.grad[0].item()), Health(0, lambda _reason: None))  # type: ignore[index]
    yield seen
    patching.restore()


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_checks_are_finished_before_gradients_are_written(
    heard: list[float], parameter: nn.Parameter, write: Callable[[nn.Parameter], Any]
) -> None:
    """Every function that scales gradients in place calls first, while they are as backward left them."""
    write(parameter)
    assert heard[0] == 3.0
    assert parameter.grad is not None
    assert parameter.grad[0].item() < 3.0


@pytest.mark.parametrize("name", ["norm", "norm by module", "value"])
def test_clipping_gives_what_it_gave(heard: list[float], name: str) -> None:
    """Result and gradients are bit for bit those of the function without a tap."""
    tapped = _parameter(0.7)
    result = WRITERS[name](tapped)
    patching.restore()
    plain = _parameter(0.7)
    expected = WRITERS[name](plain)
    assert torch.equal(tapped.grad, plain.grad)  # type: ignore[arg-type]
    assert (result is None and expected is None) or torch.equal(result, expected)


def test_an_error_of_clipping_is_the_user_s(heard: list[float]) -> None:
    """``error_if_nonfinite`` raises as it does, after the checks."""
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_([_parameter(float("nan"))], 1.0, error_if_nonfinite=True)
    assert len(heard) == 1


def test_a_fault_of_the_listener_is_counted() -> None:
    """Gradients are clipped whatever the listener does."""

    def broken(*_args: Any) -> None:
        raise ValueError("no such thing")

    health = Health(0, lambda _reason: None)
    _install(broken, health)
    parameter = _parameter()
    try:
        nn.utils.clip_grad_value_([parameter], 1.0)
    finally:
        patching.restore()
    assert parameter.grad is not None
    assert parameter.grad[0].item() == 1.0
    assert health.faults == {"clip:ValueError": 1}


def test_names_that_were_imported_are_put_back() -> None:
    """After restore the functions are the identical objects, under both names."""
    before = [getattr(place, name) for place in (nn.utils, nn.utils.clip_grad) for name in tap.NAMES]
    _install(lambda *_: None, Health(0, lambda _reason: None))
    patching.restore()
    assert [getattr(place, name) for place in (nn.utils, nn.utils.clip_grad) for name in tap.NAMES] == before
