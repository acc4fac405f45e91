"""The safetensors writer: files that the library reads back bit for bit."""

from __future__ import annotations

import gc
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sentinel_agent.tensorfile import _DTYPES, Names, host_bytes, storable, write_tensors


def _bits(dtype: torch.dtype) -> torch.Tensor:
    """Arbitrary bit patterns of a dtype, NaN payloads and denormals included."""
    raw = torch.arange(4 * 64, dtype=torch.uint8).reshape(4, 64)
    return raw % 2 == 0 if dtype is torch.bool else raw.view(dtype)


@pytest.mark.parametrize("dtype", list(_DTYPES), ids=str)
def test_every_dtype_comes_back_bit_identical(dtype: torch.dtype, tmp_path: Path) -> None:
    """Plain, transposed, 0-d, empty, sliced and repeated tensors are read back with the same bits, dtype and shape."""
    whole = _bits(dtype)
    tensors = [
        ("plain", whole),
        ("transposed", whole.t()),
        ("zero_d", whole[1, 1]),
        ("empty", whole[:0]),
        ("sliced", whole[1:3, ::2]),
        ("again", whole),
    ]
    size = write_tensors(tmp_path / "t.safetensors", tensors)
    loaded = load_file(tmp_path / "t.safetensors")
    assert size == (tmp_path / "t.safetensors").stat().st_size
    for name, tensor in tensors:
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes(host_bytes(loaded[name])) == bytes(host_bytes(tensor))


def test_views_with_pending_conjugation_or_negation_are_resolved(tmp_path: Path) -> None:
    """A lazily conjugated or negated view is written with the values it stands for."""
    z = torch.tensor([1 + 2j, 3 - 4j])
    write_tensors(tmp_path / "t.safetensors", [("conj", z.conj()), ("neg", z.conj().imag)])
    loaded = load_file(tmp_path / "t.safetensors")
    assert torch.equal(loaded["conj"], z.conj().resolve_conj())
    assert loaded["neg"].tolist() == [-2.0, 4.0]


def test_a_parameter_that_requires_gradients_is_written(tmp_path: Path) -> None:
    """Autograd is no obstacle to writing."""
    parameter = torch.nn.Parameter(torch.randn(3))
    write_tensors(tmp_path / "t.safetensors", [("p", parameter)])
    assert torch.equal(load_file(tmp_path / "t.safetensors")["p"], parameter)


def test_files_are_for_their_owner_and_never_overwritten(tmp_path: Path) -> None:
    """Mode is 0600, and a file that exists is refused."""
    path = tmp_path / "t.safetensors"
    write_tensors(path, [("a", torch.ones(1))])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_tensors(path, [("a", torch.ones(1))])


def test_names_are_printable_bounded_and_unique() -> None:
    """Control characters, broken surrogates, the reserved name and repeats are made harmless."""
    names = Names()
    assert names.take("b0.x") == "b0.x"
    assert names.take("b0.x") == "b0.x~2"
    assert names.take("a\nb\x1b[31m\ud800") == "a_b_[31m?"
    assert names.take("__metadata__") == "__metadata__~2"
    assert len(names.take("y" * 10_000)) == 512


def test_what_the_format_cannot_hold_is_told_before() -> None:
    """complex128, sparse and meta tensors are not storable."""
    assert storable(torch.ones(1))
    assert not storable(torch.ones(1, dtype=torch.complex128))
    assert not storable(torch.eye(2).to_sparse())
    assert not storable(torch.ones(1, device="meta"))


def test_a_written_tensor_can_still_be_resized(tmp_path: Path) -> None:
    """FSDP gives up gathered parameters by resizing their storage to nothing: writing one must not take that away."""
    tensor = torch.arange(8.0)
    write_tensors(tmp_path / "t.safetensors", [("t", tensor[2:6])])
    assert tensor.untyped_storage().resizable()
    tensor.untyped_storage().resize_(0)
    assert load_file(tmp_path / "t.safetensors")["t"].tolist() == [2.0, 3.0, 4.0, 5.0]


def test_the_bytes_outlive_the_tensor() -> None:
    """Whoever holds the bytes holds the memory."""
    held = host_bytes(torch.arange(100_000, dtype=torch.int64) * 1)
    gc.collect()
    torch.zeros(100_000, dtype=torch.int64)
    assert bytes(held[-8:]) == (99_999).to_bytes(8, "little")


def test_memory_that_is_gone_is_an_error() -> None:
    """A storage that was given up is not read: neither a crash nor somebody else's bytes."""
    tensor = torch.arange(8.0)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        host_bytes(tensor)


def test_a_subclass_that_only_marks_is_written() -> None:
    """A plain subclass, as data set libraries have them, has its bytes like any tensor."""
    marked = torch.arange(4.0).as_subclass(type("Marked", (torch.Tensor,), {}))
    assert bytes(host_bytes(marked)) == bytes(host_bytes(torch.arange(4.0)))
