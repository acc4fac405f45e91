"""A rank's part of a bundle: everything in it, whole or not at all, whatever the disk does."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from parts import header_of, leftovers, request, window_of
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sentinel.bundle.manifest import (
    BATCHES_FILE,
    GRADIENTS_FILE,
    PARAMETERS_FILE,
    PART_FILE,
    RNG_FILE,
)
from sentinel.bundle.reader import Bundle
from sentinel_agent.dump import PartResult, part_directory, write_part
from sentinel_agent.rng import from_tensors, restore
from sentinel_agent.window import Window


def test_a_part_holds_everything_bit_for_bit(tmp_path: Path) -> None:
    """Batches, RNG states, parameters, buffers and gradients come back as they were, NaN payloads included."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    window = Window()
    rng = window.before_batch()
    x, y = torch.randn(2, 4), torch.tensor([0, 1])
    window.loader_batch({"x": x, "y": y}, [7, 8], rng)
    model(x).sum().backward()
    bad = torch.tensor([0x7FC0BEEF, 0x3F800000], dtype=torch.int32).view(torch.float32)
    result = write_part(
        request(
            tmp_path,
            entries=window.entries(0),
            named_parameters=list(model.named_parameters()),
            named_buffers=list(model.named_buffers()),
            nonfinite_gradients=[("0.bias", bad)],
            loss=float("nan"),
            loss_scale=1024.0,
        )
    )
    part = Path(result.directory)
    header = header_of(result)
    assert part == part_directory(tmp_path, 0, 3, 1)
    assert result.bytes == sum(file.stat().st_size for file in part.iterdir())
    batches = load_file(part / BATCHES_FILE)
    assert torch.equal(batches["b0.x"], x)
    assert torch.equal(batches["b0.y"], y)
    state = load_file(part / PARAMETERS_FILE)
    assert set(state) == set(model.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert load_file(part / GRADIENTS_FILE)["0.bias"].view(torch.int32).tolist() == bad.view(torch.int32).tolist()
    restore(from_tensors({n.removeprefix("b0."): t for n, t in load_file(part / RNG_FILE).items() if n[0] == "b"}))
    assert torch.equal(torch.randn(2, 4), x)
    assert header.batches[0].structure == {"x": {"tensor": "b0.x"}, "y": {"tensor": "b0.y"}}
    assert header.batches[0].sample_indices == (7, 8)
    assert header.loss is not None
    assert header.loss != header.loss
    assert {s.name: s.nan for s in header.gradient_statistics}["0.bias"] == 1
    assert {s.name for s in header.gradient_statistics} == {name for name, _ in model.named_parameters()}
    assert {s.name for s in header.parameter_statistics} == set(model.state_dict())
    assert [s.name for s in header.batch_statistics] == ["b0.x", "b0.y"]
    assert header.reason == "a test"


def test_the_service_reads_what_the_agent_wrote(tmp_path: Path) -> None:
    """The bundle reader, which has no torch, opens the part and finds the same numbers."""
    x = torch.randn(3, 5, dtype=torch.float64)
    write_part(request(tmp_path, entries=window_of((x,)).entries(0)))
    part = Bundle.open(tmp_path / "bundles/a0-r000003").part(1)
    file = part.tensors(BATCHES_FILE)
    assert file is not None
    assert np.array_equal(file.array("b0.0"), x.numpy())
    assert part.header.step == 3


def test_only_its_owner_can_read_a_part(tmp_path: Path) -> None:
    """Directories are 0700 and files 0600: a batch may be anybody's data."""
    result = write_part(request(tmp_path, entries=window_of((torch.ones(1),)).entries(0)))
    part = Path(result.directory)
    for directory in (part, part.parent, part.parent.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in part.iterdir()} == {0o600}


def test_level_stats_writes_numbers_only(tmp_path: Path) -> None:
    """Without leave to keep tensors, statistics and structure are all there is."""
    model = torch.nn.Linear(2, 2)
    result = write_part(
        request(
            tmp_path,
            level="stats",
            entries=window_of((torch.ones(2, 2),)).entries(0),
            named_parameters=list(model.named_parameters()),
        )
    )
    header = header_of(result)
    assert [file.name for file in Path(result.directory).iterdir()] == [PART_FILE]
    assert header.batches[0].omitted == ("b0.0: byte_cap",)
    assert len(header.batch_statistics) == 1
    assert len(header.parameter_statistics) == 2


def test_odd_samples_are_named(tmp_path: Path) -> None:
    """The constant image of a batch is found, and the forward's NaN that came of it."""
    images = torch.randn(4, 1, 3, 3)
    images[2] = 0.5
    flat = images.flatten(1)
    normalised = (flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True)
    window = window_of((images, torch.zeros(4, dtype=torch.int64)))
    window.forward_inputs((normalised,), {})
    header = header_of(write_part(request(tmp_path, entries=window.entries(0))))
    assert [(f.tensor, f.sample, f.what) for f in header.sample_findings] == [
        ("b0.0", 2, "constant"),
        ("b1.args.0", 2, "nan"),
    ]


def test_a_tensor_changed_after_it_was_caught_is_marked(tmp_path: Path) -> None:
    """A large batch that the script wrote to in place is stored as it is now, and says so."""
    large, untouched, small = torch.zeros(1000), torch.zeros(1000), torch.zeros(2)
    window = window_of((large, untouched, small), clone_below=64)
    large.add_(1)
    small.add_(1)
    result = write_part(request(tmp_path, entries=window.entries(0)))
    assert header_of(result).batches[0].mutated == ("b0.0",)
    assert load_file(Path(result.directory) / BATCHES_FILE)["b0.2"].sum() == 0


def test_shared_odd_and_unreadable_tensors(tmp_path: Path) -> None:
    """Views of one storage, expanded, sparse, numpy and freed tensors are each stored or named with a reason."""
    base = torch.arange(12.0)
    gone = torch.ones(1000)
    array = np.arange(3)[::-1]
    batch = {
        "view": base[::2],
        "same_storage": base,
        "expanded": torch.ones(1).expand(3, 4),
        "s": torch.eye(3).to_sparse(),
        "numbers": array,
        "wide": torch.ones(2, dtype=torch.complex128),
        "gone": gone,
    }
    window = window_of(batch, clone_below=256)
    gone.untyped_storage().resize_(0)
    result = write_part(request(tmp_path, entries=window.entries(0)))
    stored = load_file(Path(result.directory) / BATCHES_FILE)
    entry = header_of(result).batches[0]
    assert stored["b0.view"].tolist() == base[::2].tolist()
    assert stored["b0.expanded"].shape == (3, 4)
    assert stored["b0.numbers"].tolist() == [2, 1, 0]
    rebuilt = torch.sparse_coo_tensor(stored["b0.s.indices"], stored["b0.s.values"], (3, 3), check_invariants=True)
    assert torch.equal(rebuilt.to_dense(), torch.eye(3))
    assert entry.omitted == ("b0.wide: dtype_not_storable", "b0.gone: storage_freed")
    assert entry.structure["s"] == {"sparse": "b0.s", "layout": "torch.sparse_coo", "shape": [3, 3]}
    assert entry.structure["numbers"] == {"array": "b0.numbers"}


def test_batches_come_first_where_the_budget_is_short(tmp_path: Path) -> None:
    """Parameters that do not fit are left out whole, and the part says so; the small batch is kept."""
    result = write_part(
        request(
            tmp_path,
            entries=window_of((torch.zeros(10), torch.zeros(1000))).entries(0),
            named_parameters=[("w", torch.zeros(100))],
            nonfinite_gradients=[("w", torch.zeros(100))],
            byte_cap=200,
        )
    )
    header = header_of(result)
    assert set(load_file(Path(result.directory) / BATCHES_FILE)) == {"b0.0"}
    assert header.batches[0].omitted == ("b0.1: byte_cap",)
    assert "1 of 1 gradients left out" in header.reason
    assert "parameters left out: 400 bytes are over the budget" in header.reason
    assert not (Path(result.directory) / PARAMETERS_FILE).exists()


def test_a_distributed_tensor_is_written_as_this_rank_s_part(tmp_path: Path) -> None:
    """Of a DTensor, in the batch or among the parameters, the local shard is stored and judged."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        shard = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        result = write_part(
            request(tmp_path, entries=window_of((shard,)).entries(0), named_parameters=[("w", nn.Parameter(shard))])
        )
    finally:
        dist.destroy_process_group()
    part = Path(result.directory)
    assert load_file(part / PARAMETERS_FILE)["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert load_file(part / BATCHES_FILE)["b0.0"].tolist() == [0, 1, 2, 3, 4, 5]
    assert header_of(result).parameter_statistics[0].maximum == 5


def test_a_part_is_never_overwritten(tmp_path: Path) -> None:
    """Asked again, the part that is there is returned as it is."""
    first = write_part(request(tmp_path, reason="first"))
    second = write_part(request(tmp_path, reason="second"))
    assert (second.directory, second.bytes, second.error) == (first.directory, first.bytes, "")
    assert header_of(second).reason == "first"


def test_two_threads_that_write_one_part_make_one(tmp_path: Path) -> None:
    """A judge and a request of the coordinator at the same time end in one whole part."""
    results: list[PartResult] = []
    barrier = threading.Barrier(4)

    def write() -> None:
        barrier.wait()
        results.append(write_part(request(tmp_path)))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [result.error for result in results] == [""] * 4
    assert leftovers(tmp_path) == ["rank-00001"]


def test_hostile_names_stay_inside_the_file(tmp_path: Path) -> None:
    """A parameter or a key of a batch named like a path, or with control characters, is only a name."""
    result = write_part(
        request(
            tmp_path,
            entries=window_of({"../../x": torch.ones(1), "a\x1b[31m": torch.ones(1)}).entries(0),
            named_parameters=[("../w", torch.ones(1)), ("../w", torch.zeros(1)), ("__metadata__", torch.ones(1))],
        )
    )
    assert set(load_file(Path(result.directory) / PARAMETERS_FILE)) == {"../w", "../w~2", "__metadata__~2"}
    assert set(load_file(Path(result.directory) / BATCHES_FILE)) == {"b0.../../x", "b0.a_[31m"}
    assert leftovers(tmp_path) == ["rank-00001"]
