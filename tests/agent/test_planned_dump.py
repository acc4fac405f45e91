"""A dump that was asked for: the round to come is written before its step, one that has passed as it can still be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched import Watched

from sentinel.wire.messages import DumpRequest, PartWritten


def request(round_: int, ranks: tuple[int, ...] = ()) -> DumpRequest:
    """What the coordinator sends."""
    return DumpRequest("c", 1e12, 0, round_, ranks)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rounds: int) -> list[torch.Tensor]:
    """Healthy rounds; the weight before each step."""
    before = []
    for _ in range(rounds):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        before.append(next(model.parameters()).detach().clone())
        optimizer.step()
    return before


def ready(watch: Callable[..., Watched], tmp_path: Path) -> tuple[Watched, nn.Module, torch.optim.Optimizer]:
    """A watched model and its optimizer."""
    watched = watch(run_dir=tmp_path, dump_level="batch")
    model = DistributedDataParallel(nn.Linear(3, 2))
    return watched, model, torch.optim.SGD(model.parameters(), lr=0.1)


def part_of(watched: Watched) -> Path:
    """The directory of the one part that was written."""
    (written,) = [r for r in watched.reports if isinstance(r, PartWritten)]
    assert written.error == ""
    return Path(written.directory)


def test_a_round_to_come_is_written_before_its_step(watch: Callable[..., Watched], tmp_path: Path) -> None:
    """The part has the parameters that the step was about to change, and the round's batch; training is not changed."""
    watched, model, optimizer = ready(watch, tmp_path)
    train(model, optimizer, 2)
    watched.agent._command(request(4))
    before = train(model, optimizer, 4)
    part = part_of(watched)
    assert part.parent.name == "a0-r000004"
    header = json.loads((part / "part.json").read_text())
    assert (header["round"], header["state_after_step"], header["reason"]) == (4, False, "asked for")
    assert torch.equal(load_file(part / "parameters.safetensors")["weight"], before[2])
    assert [entry["round"] for entry in header["batches"]][-1] == 4


def test_a_round_that_has_passed_is_written_as_it_still_can_be(watch: Callable[..., Watched], tmp_path: Path) -> None:
    """A rank that was ahead of the request writes at once, and says that its step is over."""
    watched, model, optimizer = ready(watch, tmp_path)
    train(model, optimizer, 3)
    watched.agent._command(request(2))
    header = json.loads((part_of(watched) / "part.json").read_text())
    assert (header["round"], header["state_after_step"]) == (2, True)


def test_a_request_for_others_is_not_ours(watch: Callable[..., Watched], tmp_path: Path) -> None:
    """Ranks that are not named, and those of another attempt, write nothing."""
    watched, model, optimizer = ready(watch, tmp_path)
    watched.agent._command(request(1, ranks=(5,)))
    watched.agent._command(DumpRequest("c", 1e12, 3, 1))
    train(model, optimizer, 3)
    assert not [r for r in watched.reports if isinstance(r, PartWritten)]
