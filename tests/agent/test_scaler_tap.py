"""The scaler tap: which step a GradScaler is making, at which scale, and whether it left the step out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sentinel_agent import patching
from sentinel_agent.errors import Health
from sentinel_agent.taps.scaler import ScalerTap

INF = float("inf")


class Heard:
    """A listener on every GradScaler of the process, and its tap."""

    def __init__(self) -> None:
        self.skips: list[tuple[Any, float | None]] = []
        self.health = Health(0, lambda _reason: None)
        self.tap = ScalerTap(self, self.health)
        self.tap.install()

    def scaler_skipped(self, optimizer: torch.optim.Optimizer, scale: float | None) -> None:
        """Note a step that was left out."""
        self.skips.append((optimizer, scale))

    def misused(self, note: str, optimizer: torch.optim.Optimizer | None) -> None:
        """Calls in a wrong order are not what is tested here."""


@pytest.fixture
def heard() -> Iterator[Heard]:
    """What the tap told."""
    yield Heard()
    patching.restore()


def _trained(gradient: float, **options: Any) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), gradient)
    return torch.optim.AdamW([parameter], **options)


def _scaler(scale: float = 8.0) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    return scaler


def test_a_skip_is_told_with_the_scale_it_happened_at(heard: Heard) -> None:
    """An unfused optimizer is never called on inf; the tap tells of it, before the scale is halved."""
    optimizer, scaler = _trained(INF), _scaler()
    assert scaler.step(optimizer) is None
    scaler.update()
    assert heard.skips == [(optimizer, 8.0)]
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize(("gradient", "skipped"), [(2.0, False), (INF, True)], ids=["finite", "inf"])
def test_a_fused_optimizer_is_asked_about_inside_its_step(heard: Heard, gradient: float, skipped: bool) -> None:
    """A fused optimizer is called either way; during the call it is known at which scale and whether it will do nothing."""
    optimizer, scaler = _trained(gradient, fused=True), _scaler()
    seen: list[tuple[float | None, bool]] = []
    optimizer.register_step_pre_hook(lambda opt, _args, _kwargs: seen.append(heard.tap.about_to_step(opt)))
    scaler.step(optimizer)
    assert seen == [(8.0, skipped)]
    assert heard.skips == []


def test_a_step_that_is_made_is_no_skip(heard: Heard) -> None:
    """The optimizer's own hook asks for the scale, and nothing else is told."""
    optimizer, scaler = _trained(2.0), _scaler()
    optimizer.register_step_pre_hook(lambda opt, _args, _kwargs: heard.tap.about_to_step(opt) and None)
    scaler.step(optimizer)
    assert heard.skips == []
    assert not torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(2))


def test_outside_of_a_scaler_there_is_no_scale(heard: Heard) -> None:
    """A plain step, and one of another optimizer than the scaler's, have none."""
    one, other, scaler = _trained(2.0), _trained(2.0), _scaler()
    seen: list[tuple[float | None, bool]] = []
    one.register_step_pre_hook(lambda _opt, _args, _kwargs: seen.append(heard.tap.about_to_step(other)))
    scaler.step(one)
    seen.append(heard.tap.about_to_step(one))
    assert seen == [(None, False), (None, False)]


def test_the_loss_behind_a_scaled_one_is_known(heard: Heard) -> None:
    """The tensor that ``scale`` returned leads back to what it was given; any other leads to itself."""
    scaler, loss = torch.amp.GradScaler("cpu", init_scale=8.0), torch.tensor(3.0, requires_grad=True)
    scaled, other = scaler.scale(loss), torch.tensor(24.0)
    assert scaled.item() == 24.0
    assert heard.tap.unscaled(scaled).item() == 3.0
    assert heard.tap.unscaled(other) is other


def test_several_losses_scaled_at_once_are_left_alone(heard: Heard) -> None:
    """``scale`` of a list returns the scaled list as without us."""
    scaled = list(torch.amp.GradScaler("cpu", init_scale=2.0).scale([torch.ones(()), torch.ones(())]))
    assert [one.item() for one in scaled] == [2.0, 2.0]


def test_a_disabled_scaler_tells_nothing(heard: Heard) -> None:
    """A scaler that is switched off steps whatever the gradients are."""
    optimizer = _trained(INF)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert heard.skips == []


def test_an_error_of_the_scaler_is_the_user_s(heard: Heard) -> None:
    """A step before the first ``scale`` is refused in torch's own words, and the next step is heard right."""
    optimizer, scaler = _trained(INF), torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(AssertionError):
        scaler.step(optimizer)
    assert heard.skips == []
    assert heard.tap.about_to_step(optimizer) == (None, False)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert heard.skips == [(optimizer, 8.0)]


def test_a_fault_of_the_listener_is_counted(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler's step returns as always, and the fault is counted."""
    patching.restore()

    def broken(_self: Heard, _optimizer: Any, _scale: Any) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(Heard, "scaler_skipped", broken)
    health = Heard().health
    assert _scaler().step(_trained(INF)) is None
    assert health.faults == {"scaler:ValueError": 1}


def test_a_scaler_that_cannot_tell_its_scale_still_steps(heard: Heard) -> None:
    """A subclass whose ``get_scale`` raises is used as its author meant it, and its step is not taken for a skip."""

    class Secretive(torch.amp.GradScaler):
        def get_scale(self) -> float:
            """Not for us."""
            raise NotImplementedError

    scaler, optimizer = Secretive("cpu", init_scale=8.0), _trained(2.0)
    optimizer.register_step_pre_hook(lambda opt, _args, _kwargs: heard.tap.about_to_step(opt) and None)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert not torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(2))
    assert heard.health.faults
    assert heard.skips == []
