"""Parameters that were written by somebody else than their optimizer: told apart, unless that is what the script always does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from watched import Watched

from sentinel.wire.messages import WRITTEN, Phase

NAN = float("nan")


def load(model: nn.Module) -> None:
    """A broken checkpoint."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["weight"][0, 0] = NAN
    model.load_state_dict(state)


def clamp(model: nn.Module) -> None:
    """Weights kept within bounds by hand."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-1.0, 1.0)


def notes(watched: Watched, between: Callable[[int, nn.Module], None], *, lr_breaks: bool = False) -> list[str]:
    """Six rounds with something ``between`` them; the notes on parameters that were found nonfinite."""
    model = nn.Linear(4, 1)
    watched.agent.root_made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(6):
        between(number, model)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        if lr_breaks and number == 3:
            optimizer.param_groups[0]["lr"] = NAN
        optimizer.step()
    return [e.note for e in watched.evidence(Phase.PARAMS)]


def test_a_broken_checkpoint_is_not_blamed_on_the_step(watched: Watched) -> None:
    """What is loaded in the middle of a training was written since the last step."""
    assert notes(watched, lambda number, model: load(model) if number == 3 else None) == [WRITTEN]


def test_a_step_that_breaks_them_is(watched: Watched) -> None:
    """Nobody has written them since."""
    assert notes(watched, lambda _number, _model: None, lr_breaks=True) == [""]


@pytest.mark.parametrize("since", [1, 3])
def test_a_script_that_always_writes_them_says_nothing(watched: Watched, since: int) -> None:
    """Where parameters are clamped between all steps, a write between two steps is no sign of a checkpoint."""
    assert notes(watched, lambda number, model: clamp(model) if number >= since else None, lr_breaks=True) == [""]


def test_marks_hold_nothing_alive(watched: Watched) -> None:
    """Models and their optimizers may go."""
    notes(watched, lambda _number, _model: None)
    assert all(ref() is None for ref, _ in watched.agent.ledger.written._marks.values())
