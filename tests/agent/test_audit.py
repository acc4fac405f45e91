"""The audit of a forward: overflow that is absorbed is seen, constants and dead infinities are not, results stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from watched import Watched

from sentinel.wire.messages import Phase


class Half(nn.Module):
    """A half-precision block whose product overflows when ``gain`` is large, and whose sigmoid absorbs it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 16.0))

    def forward(self, x: torch.Tensor, gain: float) -> torch.Tensor:
        """Infinite in the middle, finite at the end."""
        product = (x.half() * gain) @ self.weight.half()
        return torch.sigmoid(product.float()).mean()


class Masked(nn.Module):
    """Attention with the masks people write: -inf filled in, and the smallest number added."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Infinities that are meant."""
        scores = self.project(x).half() - 40.0
        causal = torch.full((4, 4), torch.finfo(torch.float16).min, dtype=torch.float16).triu(1)
        filled = (scores + causal).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
        return filled.float().softmax(-1).sum()


@pytest.fixture
def watched(watch: Callable[..., Watched]) -> Watched:
    """An agent whose settings ask for the audit."""
    return watch(audit=True)


def _train(watched: Watched, model: nn.Module, forward: Callable[[int], torch.Tensor], rounds: int) -> None:
    watched.agent.root_made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(rounds):
        optimizer.zero_grad()
        forward(number).backward()
        optimizer.step()


def test_an_absorbed_overflow_is_seen_in_the_audited_rounds(watched: Watched) -> None:
    """Rounds 0, 1, 2, 4: the product's overflow is told once per audited round, with op, dtype and this file's line."""
    model, x = Half(), torch.ones(4, 4)
    _train(watched, model, lambda number: model(x, 4000.0 if number >= 2 else 1.0), 6)
    seen = watched.evidence(Phase.AUDIT)
    assert [e.round for e in seen] == [2, 4]
    assert seen[0].check.inf == 16
    assert seen[0].note.startswith("mm overflowed float16 at test_audit.py:")


def test_masks_and_finite_values_are_not_seen(watched: Watched) -> None:
    """-inf fills, and finfo.min that underflows past the range when a score is added, are ordinary attention."""
    model, x = Masked(), torch.randn(4, 4)
    _train(watched, model, lambda _number: model(x), 5)
    assert watched.evidence(Phase.AUDIT) == []


def test_the_mode_is_left_when_the_forward_fails(watched: Watched) -> None:
    """A forward that raises leaves no dispatch mode behind."""
    model = Half()
    watched.agent.root_made(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 3), 1.0)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_the_mode_is_left_when_the_agent_goes_off(watched: Watched) -> None:
    """An agent that switches itself off inside of a forward still takes its mode out at the end."""
    model = Half()
    watched.agent.root_made(model)
    model.register_forward_pre_hook(lambda *_: watched.agent.health.disable("told by a test"))
    model(torch.ones(4, 4), 1.0)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_nothing_is_traced_unless_asked_for(watch: Callable[..., Watched]) -> None:
    """By default a forward runs under no mode, so that a model compiles whole on its very first call."""
    watched = watch()
    model = torch.compile(nn.Linear(2, 2), backend="eager", fullgraph=True)
    watched.agent.root_made(model)
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_results_are_the_same_with_and_without(watched: Watched) -> None:
    """Losses of audited rounds are bit-identical to those of rounds that are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    watched.agent.root_made(model)
    x = torch.randn(4, 4)

    def loss() -> float:
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean().item()

    audited = loss()
    watched.agent.audit._allowed = False
    assert loss() == audited
