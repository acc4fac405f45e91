"""Healthy training is the same to the last bit, with the agent and without."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from watched import Watched

from sentinel.wire.messages import Phase

ROUNDS = 30


def _samples(count: int = 4 * ROUNDS) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(count, 6), torch.randn(count, 1)), batch_size=4, shuffle=True)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


def _plain(model: nn.Module, wrapped: nn.Module, losses: list[float]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in _samples():
        optimizer.zero_grad()
        loss = (wrapped(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def _clipped(model: nn.Module, wrapped: nn.Module, losses: list[float]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in _samples():
        optimizer.zero_grad()
        loss = (wrapped(x) - y).square().mean()
        loss.backward()
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        losses.append(loss.item())


def _scaled(dtype: torch.dtype, fused: bool) -> Callable[[nn.Module, nn.Module, list[float]], None]:
    def train(model: nn.Module, wrapped: nn.Module, losses: list[float]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=5)
        for x, y in _samples():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = (wrapped(x) - y).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses += [loss.item(), scaler.get_scale()]

    return train


def _accumulated(model: nn.Module, wrapped: nn.Module, losses: list[float]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for i, (x, y) in enumerate(_samples()):
        loss = (wrapped(x) - y).square().mean() / 3
        if isinstance(wrapped, DistributedDataParallel) and i % 3 != 2:
            with wrapped.no_sync():
                loss.backward()
        else:
            loss.backward()
        losses.append(loss.item())
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def _closure(model: nn.Module, wrapped: nn.Module, losses: list[float]) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for x, y in _samples():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (wrapped(x) - y).square().mean()
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)


STORIES = {
    "plain": _plain,
    "clipping": _clipped,
    "bf16": _scaled(torch.bfloat16, fused=False),
    "fp16": _scaled(torch.float16, fused=False),
    "fp16 fused": _scaled(torch.float16, fused=True),
    "accumulation": _accumulated,
    "closure": _closure,
}
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "bucket views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "eager": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
    "aot_eager": lambda model: DistributedDataParallel(torch.compile(model, backend="aot_eager")),
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
}
CASES = [(story, "ddp") for story in STORIES] + [("plain", wrap) for wrap in WRAPS if wrap != "ddp"]


def _trained(story: str, wrap: str) -> dict[str, Any]:
    """Everything that a training leaves behind."""
    torch.compiler.reset()
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model, losses = _net(), list[float]()
    STORIES[story](model, WRAPS[wrap](model), losses)
    return {
        "losses": losses,
        "state": [(name, tensor.flatten().tolist()) for name, tensor in model.state_dict().items()],
        "gradients": [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()],
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),
    }


@pytest.mark.parametrize(("story", "wrap"), CASES, ids=[f"{story}-{wrap}" for story, wrap in CASES])
def test_healthy_training_is_bit_identical(group: None, watch: Callable[..., Watched], story: str, wrap: str) -> None:
    """Losses, scales, parameters, buffers, gradients and every generator are those of the training without an agent."""
    plain = _trained(story, wrap)
    watched = watch(timers=True)
    assert _trained(story, wrap) == plain
    assert len(watched.rounds) >= ROUNDS // 3
    assert all(r.checks for r in watched.rounds)
    assert not watched.evidence(Phase.LOSS, Phase.INIT, Phase.PARAMS, Phase.BUFFERS)
    if story != "fp16" and story != "fp16 fused" and story != "bf16":
        assert not watched.evidence()


def test_a_compiled_model_stays_compiled(watched: Watched) -> None:
    """The hooks of the agent lead to no recompilation from step to step and to no graph break of their own."""
    torch.compiler.reset()
    counted = torch._dynamo.testing.CompileCounter()
    model = DistributedDataParallel(torch.compile(_net(), backend=counted))
    watched.agent.root_made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
    assert counted.frame_count == 1
    assert watched.steps == list(range(5))
