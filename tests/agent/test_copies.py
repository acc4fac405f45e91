"""In a large job some ranks write the replicas' parameters for all, and a replay finds them again, or sees that they were none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parts import header_of, request
from safetensors.torch import load_file
from torch import nn

from sentinel.bundle.manifest import OPTIMIZER_FILE, PARAMETERS_FILE
from sentinel.bundle.reader import Bundle
from sentinel.postmortem.difference import compare
from sentinel_agent.copies import COPIES_FROM, left_to_others
from sentinel_agent.dump import write_part
from sentinel_agent.replay.recording import Recording

WORLD = 8


def net() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("rank", "world_size", "suspect", "leaves"),
    [
        (3, WORLD, False, True),
        (3, WORLD, True, False),
        (0, WORLD, False, False),
        (WORLD - 1, WORLD, False, False),
        (2, COPIES_FROM - 1, False, False),
    ],
    ids=["an onlooker", "a suspect", "the first", "the last", "a small job"],
)
def test_who_leaves_its_replica_to_others(rank: int, world_size: int, suspect: bool, leaves: bool) -> None:
    """First, last and suspects write; the others' replicas are the same, or the fingerprint tells."""
    found = left_to_others(rank, world_size, suspect=suspect, replicated=["a", "b"])
    assert found == (frozenset({"a", "b"}) if leaves else frozenset())


def written(place: Path, *, drifted: bool = False) -> Bundle:
    """A bundle of rank 0, which writes all, and rank 3, which leaves its parameters to others; its BatchNorm is its own."""
    for rank in (0, 3):
        model = net()
        if rank == 3:
            model[1].running_mean += 1.0
            with torch.no_grad():
                model[0].weight[0, 0] += 1.0 if drifted else 0.0
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        parameters = list(model.named_parameters())
        result = write_part(
            request(
                place,
                rank=rank,
                world_size=WORLD,
                level="full",
                named_parameters=parameters,
                named_buffers=list(model.named_buffers()),
                optimizers=(optimizer,),
                left_to_others=left_to_others(rank, WORLD, suspect=False, replicated=dict(parameters)),
            )
        )
        assert header_of(result).rank == rank
    return Bundle.open(place / "bundles" / "a0-r000003")


def test_what_is_left_out_is_found_in_another_part(tmp_path: Path) -> None:
    """Rank 3's part holds its own buffers only; its replay has rank 0's parameters with them, and knows that they are equal."""
    bundle = written(tmp_path)
    own, others = (load_file(bundle.part(rank).path / PARAMETERS_FILE) for rank in (3, 0))
    assert set(own) == {name for name, _ in net().named_buffers()}
    assert not (bundle.part(3).path / OPTIMIZER_FILE).exists()
    recording = Recording(bundle, 3)
    assert recording.weights.keys() == others.keys()
    assert all(torch.equal(recording.weights[name], others[name]) for name, _ in net().named_parameters())
    assert torch.equal(recording.weights["1.running_mean"], own["1.running_mean"])
    assert not recording.copies_differ
    copies = bundle.part(3).header.copies
    assert copies is not None
    assert (copies.ranks, set(copies.names)) == ((0, WORLD - 1), {name for name, _ in net().named_parameters()})


def test_a_replica_that_had_drifted_is_seen(tmp_path: Path) -> None:
    """The fingerprint of what rank 3 had is not that of rank 0's part."""
    assert Recording(written(tmp_path, drifted=True), 3).copies_differ


def test_a_comparison_says_where_the_rest_is(tmp_path: Path) -> None:
    """A tensor in one part only, because the other leaves it to others, is told as that."""
    bundle = written(tmp_path)
    told = compare(bundle.part(0), bundle.part(3), ("a", "b"))
    details = {one.name: one.detail for one in told.tensors if one.file == PARAMETERS_FILE}
    assert details["0.weight"] == f"left to the parts of ranks 0, {WORLD - 1}"
    assert details["1.running_mean"] == ""
