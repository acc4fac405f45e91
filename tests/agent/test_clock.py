"""The clock with more than one optimizer: rounds of a second one belong to the iteration that the first has counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched import Watched

N = 4
Wrap = Callable[[nn.Module], nn.Module]
WRAPS: dict[str, Wrap] = {"bare": lambda model: model, "ddp": DistributedDataParallel}


def _net(inputs: int = 3, outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


def _batch() -> torch.Tensor:
    return torch.randn(5, 3)


def _sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _loss(model: nn.Module, batch: torch.Tensor | None = None) -> torch.Tensor:
    loss: torch.Tensor = model(_batch() if batch is None else batch).square().mean()
    return loss


class Game:
    """A generator and a discriminator with an optimizer each."""

    def __init__(self, wrap: Wrap) -> None:
        self.generator, self.discriminator = wrap(_net(3, 3)), wrap(_net())
        self.of_generator = _sgd(self.generator.parameters())
        self.of_discriminator = _sgd(self.discriminator.parameters())

    def train_discriminator(self) -> None:
        """Real and generated samples, one backward."""
        self.of_discriminator.zero_grad()
        with torch.no_grad():
            generated = self.generator(_batch())
        _loss(self.discriminator, torch.cat([_batch(), generated])).backward()
        self.of_discriminator.step()

    def train_generator(self, *, step: bool = True) -> None:
        """The gradient goes through the discriminator."""
        self.of_generator.zero_grad()
        self.of_discriminator.zero_grad()
        _loss(self.discriminator, self.generator(_batch())).backward()
        if step:
            self.of_generator.step()


@pytest.fixture(params=[WRAPS["bare"], WRAPS["ddp"]], ids=["bare", "ddp"])
def game(request: pytest.FixtureRequest, watched: Watched) -> Game:
    """Two networks that the agent knows."""
    made = Game(request.param)
    watched.agent.root_made(made.generator)
    watched.agent.root_made(made.discriminator)
    return made


def test_two_optimizers_taking_turns(watched: Watched, game: Game) -> None:
    """Each backward and step is a round; both of an iteration have the loop's number."""
    for _ in range(N):
        game.train_discriminator()
        game.train_generator()
    assert watched.steps == [i for i in range(N) for _ in range(2)]
    assert [r.round for r in watched.rounds] == list(range(2 * N))


def test_two_optimizers_after_one_backward(watched: Watched) -> None:
    """One backward for both: the first step closes the round, the second finds nothing new."""
    model = _net()
    both = [_sgd(model[0].parameters()), torch.optim.AdamW(model[2].parameters())]  # type: ignore[index]
    for _ in range(N):
        for optimizer in both:
            optimizer.zero_grad()
        _loss(model).backward()
        for optimizer in both:
            optimizer.step()
    assert watched.steps == list(range(N))


@pytest.mark.parametrize("later", [1, 2])
def test_a_second_optimizer_that_steps_rarely(watched: Watched, game: Game, later: int) -> None:
    """Several turns of the discriminator for one of the generator: the first optimizer's rounds are the loop's."""
    for i in range(2 * N):
        game.train_discriminator()
        if i % (later + 1) == later:
            game.train_generator()
    of_first = sorted(set(watched.steps))
    assert of_first == list(range(2 * N))
    assert watched.steps == sorted(watched.steps)


def test_a_skipped_step_of_the_second_optimizer_does_not_count_twice(watched: Watched, game: Game) -> None:
    """An iteration whose generator step is left out is still one iteration."""
    for i in range(N):
        game.of_generator.zero_grad()
        game.train_discriminator()
        game.train_generator(step=i != 1)
    assert watched.steps == [i for i in range(N) for _ in range(2)]


def test_an_optimizer_that_takes_over(watched: Watched) -> None:
    """Training the head first and then everything, with a new optimizer: the counter goes on."""
    model = _net()
    head, everything = _sgd(model[2].parameters()), _sgd(model.parameters())  # type: ignore[index]
    for optimizer in (head, everything):
        for _ in range(N):
            model.zero_grad()
            _loss(model).backward()
            optimizer.step()
    assert watched.steps == list(range(2 * N))


def test_an_optimizer_made_anew_each_epoch(watched: Watched) -> None:
    """Where the old optimizer is gone, the new one is the first."""
    model = _net()
    for _ in range(2):
        optimizer = _sgd(model.parameters())
        for _ in range(N):
            optimizer.zero_grad()
            _loss(model).backward()
            optimizer.step()
        del optimizer
    assert watched.steps == list(range(2 * N))
