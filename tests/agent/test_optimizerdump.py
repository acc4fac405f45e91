"""Level full keeps the optimizers too: enough to go on from the step before the fault."""

from __future__ import annotations

from pathlib import Path

import torch
from parts import header_of, request
from safetensors.torch import load_file
from torch import nn

from sentinel.bundle.manifest import OPTIMIZER_FILE
from sentinel_agent.dump import write_part
from sentinel_agent.optimizerdump import OptimizerDump


def trained(kind: type[torch.optim.Optimizer], **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after two steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), **options)  # type: ignore[call-arg]
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def names_of(model: nn.Module) -> dict[int, str]:
    """Names by id."""
    return {id(p): name for name, p in model.named_parameters()}


def test_state_is_written_bit_for_bit(tmp_path: Path) -> None:
    """Moments and step counts of AdamW come back as they were, and its options are said."""
    model, optimizer = trained(torch.optim.AdamW, lr=0.01)
    result = write_part(
        request(
            tmp_path,
            level="full",
            named_parameters=list(model.named_parameters()),
            optimizers=(optimizer,),
            scaler={"scale": 1024.0},
        )
    )
    kept = load_file(Path(result.directory) / OPTIMIZER_FILE)
    expected = {
        f"o0.{name}.{key}": value for name, p in model.named_parameters() for key, value in optimizer.state[p].items()
    }
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in expected.items())
    header = header_of(result)
    (described,) = header.optimizers
    assert described.type == "torch.optim.adamw.AdamW"
    assert described.groups[0].parameters == ("weight", "bias")
    assert described.groups[0].options["lr"] == 0.01
    assert header.scaler == {"scale": 1024.0}


def test_other_levels_leave_it_out(tmp_path: Path) -> None:
    """Twice the parameters' bytes are not written unless asked for."""
    model, optimizer = trained(torch.optim.AdamW)
    result = write_part(request(tmp_path, named_parameters=list(model.named_parameters()), optimizers=(optimizer,)))
    assert not (Path(result.directory) / OPTIMIZER_FILE).exists()
    assert header_of(result).optimizers == ()


def test_state_over_the_budget_is_named(tmp_path: Path) -> None:
    """Parameters come first; an optimizer that does not fit is left out whole, and the reason says so."""
    model, optimizer = trained(torch.optim.AdamW)
    named = list(model.named_parameters())
    cap = sum(p.nbytes for _, p in named)
    result = write_part(request(tmp_path, level="full", named_parameters=named, optimizers=(optimizer,), byte_cap=cap))
    assert not (Path(result.directory) / OPTIMIZER_FILE).exists()
    assert "optimizer state left out" in header_of(result).reason


def test_numbers_and_strange_things_are_told_apart() -> None:
    """Plain numbers of a state are kept as numbers, and what has no form is named with its type."""
    model, optimizer = trained(torch.optim.SGD, lr=0.1)
    optimizer.state[model.weight] = {"count": 3, "tried": [1], "momentum_buffer": None}
    dump = OptimizerDump([optimizer], names_of(model))
    (described,) = dump.described
    assert described.scalars["weight"] == {"count": 3, "momentum_buffer": None}
    assert described.omitted == ("weight.tried: list",)
    assert [name for name, _ in dump.tensors] == []
