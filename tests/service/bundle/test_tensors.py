"""Tensor files: the values that were written, and no file that is not what it says."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sentinel.bundle.paths import BundleRefused
from sentinel.bundle.tensors import TensorFile

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
]


def write(path: Path, header: object, content: bytes = b"", length: int | None = None) -> None:
    """A file laid out like safetensors, with any header."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + content)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (4, 0, 2)])
def test_arrays_are_those_that_were_saved(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    """Every dtype numpy has comes back bit by bit, in its shape."""
    saved = (
        np.arange(int(np.prod(shape)) or 0, dtype="int64").reshape(shape).astype(dtype) if shape else np.ones((), dtype)
    )
    save_file({"x": saved, "y": saved.copy()}, tmp_path / "t.safetensors")
    tensors = TensorFile(tmp_path, "t.safetensors")
    assert sorted(tensors.names) == ["x", "y"]
    read = tensors.array("x")
    assert (read.dtype, read.shape) == (saved.dtype, shape)
    assert read.tobytes() == saved.tobytes() == tensors.raw("y")


def test_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    """bfloat16 has no numpy dtype; its values are exact in float32, NaN and infinities too."""
    values = np.array([0.0, -1.5, 3.0e38, np.inf, -np.inf, np.nan], dtype=np.float32)
    raw = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    write(tmp_path / "t", {"x": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}, raw)
    tensors = TensorFile(tmp_path, "t")
    widened = tensors.array("x")
    assert widened.dtype == np.float32
    assert widened.shape == (2, 3)
    assert widened[0, 1] == -1.5
    statistics = tensors.statistics("x")
    assert (statistics.dtype, statistics.nan, statistics.inf, statistics.minimum) == ("BF16", 1, 2, -1.5)


def test_eight_bit_floats_are_described_and_given_raw(tmp_path: Path) -> None:
    """A dtype numpy cannot hold has a shape and bytes, and asking for its array is refused in one line."""
    write(tmp_path / "t", {"x": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, b"abcd")
    tensors = TensorFile(tmp_path, "t")
    assert tensors.raw("x") == b"abcd"
    assert tensors.statistics("x").shape == (4,)
    with pytest.raises(BundleRefused, match="F8_E4M3"):
        tensors.array("x")


def test_statistics_are_over_finite_elements_and_do_not_overflow(tmp_path: Path) -> None:
    """NaN and infinities are counted apart, and the largest finite values do not turn the statistics infinite."""
    huge = float(np.finfo(np.float64).max)
    save_file({"x": np.array([huge, -huge, np.nan, np.inf])}, tmp_path / "t")
    statistics = TensorFile(tmp_path, "t").statistics("x")
    assert (statistics.nan, statistics.inf, statistics.maximum, statistics.mean) == (1, 1, huge, 0.0)
    assert statistics.std == huge


@pytest.mark.parametrize(
    ("header", "content", "reason"),
    [
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"abc", "outside"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, b"abcdefgh", "not those of its shape"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"abcdefgh", "gap"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"", "outside"),
        ({"x": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"abcd", "outside"),
        ({"x": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]}}, b"abcd", "unknown dtype"),
        ({"x": {"dtype": "U8", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}, b"abcd", "not those of its shape"),
        ({"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], "more": 1}}, b"abcd", "no safetensors header"),
        (
            {
                "x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "y": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
            },
            b"abcdef",
            "overlaps",
        ),
        ({"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"abcdHIDDEN", "no tensor owns"),
        ({"x": 3}, b"", "no safetensors header"),
        ([], b"", "no safetensors header"),
        (b"\xff\xff\xff\xff", b"", "no safetensors header"),
        (b"[" * 50_000, b"", "no safetensors header"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: object, content: bytes, reason: str) -> None:
    """Offsets, shapes, dtypes and layout must agree with the file, or nothing of it is read."""
    write(tmp_path / "t", header, content)
    with pytest.raises(BundleRefused, match=reason) as refused:
        TensorFile(tmp_path, "t")
    assert "\n" not in str(refused.value)


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """The length field is checked against the file and a cap, not believed."""
    for length in (1 << 20, 1 << 40, (1 << 64) - 1):
        write(tmp_path / "t", b"{}", length=length)
        with pytest.raises(BundleRefused, match="header of"):
            TensorFile(tmp_path, "t")


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    """A file cut anywhere is refused; none of its tensors is half read."""
    save_file({"x": np.arange(8.0)}, tmp_path / "t")
    whole = (tmp_path / "t").read_bytes()
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    for cut in {0, 7, 8, 9, len(whole) - 1, *random.Random(seed).sample(range(len(whole)), 20)}:
        (tmp_path / "t").write_bytes(whole[:cut])
        with pytest.raises(BundleRefused):
            TensorFile(tmp_path, "t")


def test_a_file_cut_after_it_was_opened_is_refused_at_the_read(tmp_path: Path) -> None:
    """A file that changes under the reader is an error of one line, not a crash."""
    save_file({"x": np.arange(8.0)}, tmp_path / "t")
    tensors = TensorFile(tmp_path, "t")
    (tmp_path / "t").write_bytes((tmp_path / "t").read_bytes()[:-1])
    with pytest.raises(BundleRefused, match="truncated"):
        tensors.array("x")
