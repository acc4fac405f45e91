"""Parameters are called what the user calls them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sentinel_agent.naming import Naming, user_name


class Outer(nn.Module):
    """A model with attribute names that look like a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_model = nn.Linear(2, 2)


def _names(naming: Naming) -> list[str]:
    return [name for name, _ in naming.parameters()]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conv.weight", "conv.weight"),
        ("module.conv.weight", "conv.weight"),
        ("_orig_mod.conv.weight", "conv.weight"),
        ("module._orig_mod.conv.weight", "conv.weight"),
        ("_orig_mod.module.conv.weight", "conv.weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight", "layers.0.weight"),
        ("layers.0._orig_mod.weight", "layers.0.weight"),
    ],
)
def test_wrappers_prefixes_are_taken_off(name: str, expected: str) -> None:
    """What DDP, torch.compile and FSDP1 add to a name is not shown."""
    assert user_name(name) == expected


def test_a_name_that_only_begins_like_a_wrapper_s_is_kept() -> None:
    """An attribute of the user's is not cut because its first letters are those of a wrapper's."""
    assert user_name("net._orig_model.weight") == "net._orig_model.weight"


def test_a_submodule_called_module_keeps_its_name() -> None:
    """'module' is DDP's name for what it wraps, and a usual name of a user's own attribute."""
    naming = Naming()
    naming.add_root(model := Outer())
    assert _names(naming) == [name for name, _ in model.named_parameters()]


def test_a_compiled_and_wrapped_model_has_the_user_s_names(group: None) -> None:
    """DDP around torch.compile around a model, or the other way, is named like the bare model."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    expected = [name for name, _ in model.named_parameters()]
    for root in (
        DistributedDataParallel(model),
        DistributedDataParallel(torch.compile(model, backend="eager")),
        torch.compile(DistributedDataParallel(model), backend="eager"),
    ):
        naming = Naming()
        naming.add_root(root)
        assert _names(naming) == expected
        assert [name for name, _ in naming.buffers()] == [name for name, _ in model.named_buffers()]


def test_a_wrapped_part_of_a_model_has_the_user_s_names(group: None) -> None:
    """Where only the encoder is wrapped, its parameters are named as if it were not."""
    naming = Naming()
    model = nn.ModuleDict({"encoder": DistributedDataParallel(nn.Linear(2, 2)), "head": nn.Linear(2, 1)})
    naming.add_root(model)
    assert _names(naming) == ["encoder.weight", "encoder.bias", "head.weight", "head.bias"]


def test_the_outermost_root_gives_the_names(group: None) -> None:
    """FSDP2 is applied to each layer and then to the model: names are those within the model."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    expected = [name for name, _ in model.named_parameters()]
    naming = Naming()
    for module in (*model, model):
        naming.add_root(fully_shard(module))
    assert _names(naming) == expected


def test_a_shared_parameter_is_named_once() -> None:
    """Tied weights, and a model that is also wrapped, are listed once, under the first name."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    naming = Naming()
    assert naming.add_root(model)
    assert not naming.add_root(model)
    assert naming.add_root(nn.ModuleList([model]))
    assert _names(naming) == ["0.weight", "0.bias", "1.bias"]


def test_parameters_that_no_module_owns_are_numbered() -> None:
    """A bare tensor in an optimizer is called by its place there; those a module owns keep their names and places."""
    model, bare = nn.Linear(2, 1), torch.zeros(3, requires_grad=True)
    naming = Naming()
    naming.add_root(model)
    optimizer = torch.optim.SGD([{"params": [*model.parameters()]}, {"params": [bare]}], lr=0.1)
    assert naming.add_optimizer(optimizer)
    assert not naming.add_optimizer(optimizer)
    assert _names(naming) == ["weight", "bias", "param_2"]
    assert naming.optimizers() == [optimizer]


def test_nothing_is_kept_alive() -> None:
    """Roots and optimizers are held weakly: a model that the user drops is gone."""
    naming = Naming()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    naming.add_root(model)
    naming.add_optimizer(optimizer)
    del model, optimizer
    gc.collect()
    assert _names(naming) == []
    assert naming.optimizers() == []


def test_gathered_parameters_stand_for_their_shards(group: None) -> None:
    """Inside of an FSDP2 forward the modules hold gathered parameters; what is named, written and looked at are the shards."""
    naming = Naming()
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    naming.add_root(model)
    shards = dict(naming.parameters())
    model.unshard()
    assert "_local_tensor" not in vars(model[0].weight)
    assert {name: id(p) for name, p in naming.parameters()} == {name: id(p) for name, p in shards.items()}
    model.reshard()
    assert {name: id(p) for name, p in naming.parameters()} == {name: id(p) for name, p in shards.items()}
