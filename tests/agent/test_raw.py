"""Gradients kept before a reduction, and buffers kept from the round's start."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from parts import header_of, request

from sentinel.bundle.reader import Bundle
from sentinel_agent import raw, startbuffers
from sentinel_agent.dump import write_part
from sentinel_agent.naming import Naming
from sentinel_agent.raw import RawGradients
from sentinel_agent.startbuffers import StartBuffers


def test_wanted_gradients_are_cloned_once() -> None:
    """What a reduction writes later does not change what was kept, and the first state stays."""
    gradient = torch.tensor([math.nan, 1.0])
    kept = RawGradients()
    kept.keep([("a", gradient), ("b", torch.ones(1))], ("a",))
    gradient.fill_(7.0)
    kept.keep([("a", gradient)], ("a",))
    assert [(name, tensor[1].item()) for name, tensor in kept] == [("a", 1.0)]
    assert "a" in kept
    assert "b" not in kept


def test_the_budget_ends_the_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the budget nothing more is cloned."""
    monkeypatch.setattr(raw, "BUDGET", 8)
    kept = RawGradients()
    kept.keep([("a", torch.ones(2)), ("b", torch.ones(2))], ("a", "b"))
    assert [name for name, _ in kept] == ["a"]


def test_buffers_are_those_of_the_rounds_start() -> None:
    """A forward that changes a running mean does not change the copy."""
    layer = torch.nn.BatchNorm1d(3)
    naming = Naming()
    naming.add_root(layer)
    buffers = StartBuffers(naming)
    buffers.take()
    layer(torch.randn(8, 3) + 5)
    assert dict(buffers.named())["running_mean"].tolist() == [0.0, 0.0, 0.0]
    buffers.take()
    assert dict(buffers.named())["running_mean"].tolist() == layer.running_mean.tolist()  # type: ignore[union-attr]


def test_too_many_buffers_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with more bytes of buffers than the budget costs nothing."""
    monkeypatch.setattr(startbuffers, "BUDGET", 4)
    naming = Naming()
    naming.add_root(torch.nn.BatchNorm1d(3))
    buffers = StartBuffers(naming)
    buffers.take()
    assert buffers.named() == []


def test_the_part_holds_both(tmp_path: Path) -> None:
    """A bundle's buffers are those of the start, its header names the raw gradients, statistics are of what is now."""
    now, then = torch.tensor([math.inf, 1.0]), torch.tensor([0.5, 1.0])
    result = write_part(
        request(
            tmp_path,
            named_buffers=[("mean", now)],
            start_buffers=[("mean", then)],
            nonfinite_gradients=[("w", torch.tensor([math.nan]))],
            raw_gradients=("w",),
        )
    )
    header = header_of(result)
    assert header.raw_gradients == ("w",)
    assert header.parameter_statistics[0].inf == 1
    tensors = Bundle.open(tmp_path / "bundles" / "a0-r000003").part(1).tensors("parameters.safetensors")
    assert tensors is not None
    assert tensors.array("mean").tolist() == [0.5, 1.0]
