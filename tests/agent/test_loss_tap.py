"""The loss tap: the value that backward is called on, and where a backward begins and ends."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sentinel_agent import patching
from sentinel_agent.errors import Health
from sentinel_agent.taps import loss as tap

NAN = float("nan")


class Heard:
    """What the tap told, in order."""

    def __init__(self) -> None:
        self.health = Health(0, lambda _reason: None)
        self.events: list[Any] = []

    @property
    def losses(self) -> list[float]:
        """Values told."""
        return [event for event in self.events if isinstance(event, float)]


@pytest.fixture
def heard() -> Iterator[Heard]:
    """A listener on every backward of the process."""
    heard = Heard()
    tap.install(
        heard.events.append,
        lambda: heard.events.append("begins"),
        lambda: heard.events.append("ended"),
        lambda tensor: tensor,
        heard.health,
    )
    yield heard
    patching.restore()


def _leaf(value: float = 2.0) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True)


def test_a_backward_is_told_from_begin_to_end(heard: Heard) -> None:
    """It begins, its loss is told, it ends, and gradients are there."""
    leaf = _leaf()
    (leaf * 3).backward()
    assert heard.events == ["begins", 6.0, "ended"]
    assert leaf.grad is not None
    assert leaf.grad.item() == 3.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_loss_of_any_precision_is_told(heard: Heard, dtype: torch.dtype) -> None:
    """Half and double precision losses are numbers like others."""
    (_leaf() * 3).to(dtype).backward()
    assert heard.losses == [6.0]


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")], ids=str)
def test_a_nonfinite_loss_is_told(heard: Heard, value: float) -> None:
    """The value comes as it is."""
    (_leaf() * value).backward()
    assert [str(loss) for loss in heard.losses] == [str(value)]


def test_a_loss_of_one_element_in_any_shape_is_told(heard: Heard) -> None:
    """A loss that kept a dimension is a loss."""
    (_leaf() * torch.ones(1, 1)).backward()
    assert heard.losses == [2.0]


def test_a_backward_without_one_loss_is_heard_without_a_value(heard: Heard) -> None:
    """Several roots, or a root of several elements with its gradient, have no loss to tell."""
    leaf = _leaf()
    torch.autograd.backward([leaf * 2, leaf * 3])
    (leaf * torch.ones(3)).backward(torch.ones(3))
    assert heard.events == ["begins", "ended"] * 2


def test_the_keyword_form_is_the_same(heard: Heard) -> None:
    """``torch.autograd.backward(tensors=...)``, with a tuple, is heard."""
    torch.autograd.backward(tensors=(_leaf() * 2,), grad_tensors=None)
    assert heard.events == ["begins", 4.0, "ended"]


def test_what_is_known_of_the_loss_s_scale_is_taken_off() -> None:
    """The value told is that of the tensor which ``unscaled`` gives in the place of the root."""
    told: list[float] = []
    tap.install(told.append, lambda: None, lambda: None, lambda _t: torch.tensor(7.0), Health(0, lambda _reason: None))
    try:
        _leaf().backward()
    finally:
        patching.restore()
    assert told == [7.0]


def test_an_error_in_backward_is_the_user_s(heard: Heard) -> None:
    """A graph that is used up raises as always; that backward has begun and not ended."""
    loss = _leaf() * 2 * _leaf()
    loss.backward()
    heard.events.clear()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert heard.events == ["begins", 4.0 * 2]


@pytest.mark.parametrize("site", ["loss", "begins", "ended"])
def test_a_fault_of_the_listener_is_counted(site: str) -> None:
    """Whichever callback fails, backward runs and the fault is counted."""

    def broken(*_args: Any) -> None:
        raise ValueError("no such thing")

    def quiet(*_args: Any) -> None:
        return None

    health = Health(0, lambda _reason: None)
    loss, begins, ended = (broken if site == name else quiet for name in ("loss", "begins", "ended"))
    tap.install(loss, begins, ended, lambda tensor: tensor, health)
    try:
        leaf = _leaf()
        (leaf * 3).backward()
    finally:
        patching.restore()
    assert leaf.grad is not None
    assert health.faults == {f"{'backward_end' if site == 'ended' else 'loss'}:ValueError": 1}


@pytest.mark.parametrize("detects", [True, False])
def test_a_backward_that_anomaly_mode_ends_is_told(detects: bool) -> None:
    """With the operator that made NaN, and torch's error goes on to the script; any other error tells nothing."""
    told: list[str] = []
    health = Health(0, lambda _reason: None)
    tap.install(lambda _loss: None, lambda: None, lambda: None, lambda tensor: tensor, health, None, told.append)
    leaf = _leaf(0.0)
    loss = (leaf * 1.0).sqrt() * 0.0
    try:
        with torch.autograd.set_detect_anomaly(detects), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not detects:
                loss.backward()
            with pytest.raises(RuntimeError, match="returned nan values" if detects else "a second time"):
                loss.backward()
    finally:
        patching.restore()
    assert told == (["SqrtBackward0"] if detects else [])
    assert not health.faults


def test_a_checkpoint_s_inner_backward_is_not_told(heard: Heard) -> None:
    """A reentrant checkpoint calls backward again on its own output: what was told of the script's loss stands."""
    leaf = _leaf()
    (checkpoint(lambda x: x * 5, leaf, use_reentrant=True) * 2).backward()
    assert heard.events == ["begins", 20.0, "ended"]


def test_a_compiled_backward_is_left_to_the_compiler(heard: Heard) -> None:
    """A compiled forward with its backward outside is heard as without compilation."""
    leaf = _leaf()
    torch.compile(lambda x: x * 3, backend="aot_eager")(leaf).backward()
    assert heard.events == ["begins", 6.0, "ended"]
