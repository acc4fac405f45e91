"""Statistics and sample findings at the edges of every dtype."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import pytest
import torch

from sentinel_agent.statistics import MAX_FINDINGS, sample_findings, tensor_statistics

NAN, INF = float("nan"), float("inf")


def test_matches_torch_on_ordinary_values() -> None:
    """Minimum, maximum, mean and population deviation agree with torch's, over more than one chunk."""
    seed = time.time_ns() % 2**31
    print(f"seed {seed}")
    tensor = torch.randn(1_500_000, generator=torch.Generator().manual_seed(seed)) * 3 + 100
    found = tensor_statistics("t", tensor)
    wide = tensor.double()
    assert (found.minimum, found.maximum) == (wide.min().item(), wide.max().item())
    assert found.mean == pytest.approx(wide.mean().item(), rel=1e-12)
    assert found.std == pytest.approx(wide.std(correction=0).item(), rel=1e-9)
    assert (found.nan, found.inf, found.shape, found.dtype) == (0, 0, (1_500_000,), "float32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_quick_way_agrees_with_float64(dtype: torch.dtype) -> None:
    """Whatever scale, offset and nonfinite elements: deviation within 1e-4, mean within 1e-5 of the deviation or of itself."""
    seed = time.time_ns() % 2**31
    print(f"seed {seed}")
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(40):
        scale, offset = 10 ** draw.uniform(-6, 4), draw.choice((0.0, 0.3, 3.0, 1e3))
        tensor = ((torch.randn(draw.randrange(1, 400_000)) + offset) * scale).clamp(-6e4, 6e4).to(dtype)
        tensor[torch.rand(tensor.shape) < draw.choice((0.0, 0.0, 1e-5))] = INF
        tensor[: draw.choice((0, 0, tensor.numel() // 2))] = 0
        exact = tensor[tensor.isfinite()].double()
        found = tensor_statistics("t", tensor)
        assert found.inf == tensor.numel() - exact.numel()
        if exact.numel() == 0:
            continue
        mean, std = exact.mean().item(), exact.std(correction=0).item()
        assert (found.minimum, found.maximum) == (exact.min().item(), exact.max().item())
        assert found.std == pytest.approx(std, rel=1e-4, abs=1e-12 * scale)
        assert found.mean == pytest.approx(mean, rel=1e-5, abs=1e-5 * std)


def test_counts_nan_and_inf_apart_and_leaves_them_out() -> None:
    """NaN and infinities are counted, and the rest is judged without them."""
    found = tensor_statistics("t", torch.tensor([1.0, NAN, 3.0, INF, -INF, NAN, NAN]))
    assert (found.nan, found.inf) == (3, 2)
    assert (found.minimum, found.maximum, found.mean, found.std) == (1.0, 3.0, 2.0, 1.0)


def test_nothing_finite_has_no_extremes() -> None:
    """A tensor of NaN only has counts and no numbers."""
    found = tensor_statistics("t", torch.full((4,), NAN))
    assert found.nan == 4
    assert found.minimum is found.maximum is found.mean is found.std is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_finite_values_do_not_overflow(dtype: torch.dtype) -> None:
    """Mean and deviation of the dtype's own maximum and minimum stay finite and right."""
    top = torch.finfo(dtype).max
    found = tensor_statistics("t", torch.tensor([top, -top, top, -top], dtype=dtype))
    assert (found.minimum, found.maximum, found.mean) == (-top, top, 0.0)
    assert found.std == pytest.approx(top, rel=1e-12)


def test_a_huge_value_in_a_late_chunk_rescales_what_came_before() -> None:
    """float64 values whose squares overflow are handled even when ordinary ones came first."""
    tensor = torch.ones(1 << 20, dtype=torch.float64)
    found = tensor_statistics("t", torch.cat([tensor, tensor * 1e300]))
    assert found.mean == pytest.approx(5e299)
    assert found.std == pytest.approx(5e299)


def test_small_deviations_of_a_large_mean_are_kept() -> None:
    """A constant tensor has deviation zero, whatever its value."""
    assert tensor_statistics("t", torch.full((1000,), 1e8)).std == 0.0


@pytest.mark.parametrize(
    ("make", "minimum", "maximum"),
    [
        (lambda: torch.tensor([1, 2, 250], dtype=torch.uint8), 1, 250),
        (lambda: torch.tensor([-5, 7], dtype=torch.int64), -5, 7),
        (lambda: torch.tensor([True, False]), 0, 1),
        (lambda: torch.tensor([1.0, -448.0]).to(torch.float8_e4m3fn), -448, 1),
        (lambda: torch.tensor([1 + 2j, -3j]), -3, 2),
        (lambda: torch.tensor([[0.0, 5.0], [0.0, -1.0]]).to_sparse(), -1, 5),
        (lambda: torch.tensor([[0.0, 5.0], [0.0, -1.0]]).to_sparse_csr(), -1, 5),
        (lambda: torch.tensor(4.0), 4, 4),
        (lambda: torch.arange(6.0).reshape(2, 3).t(), 0, 5),
        (lambda: torch.nn.Parameter(torch.tensor([2.0])), 2, 2),
    ],
    ids=["uint8", "int64", "bool", "fp8", "complex", "coo", "csr", "0-d", "transposed", "parameter"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_every_kind_of_tensor_has_statistics(make: Callable[[], torch.Tensor], minimum: float, maximum: float) -> None:
    """Integers, booleans, eight bit floats, complex, sparse, 0-d and strided tensors are all read."""
    found = tensor_statistics("t", make())
    assert (found.minimum, found.maximum) == (minimum, maximum)


@pytest.mark.parametrize("tensor", [torch.zeros(0, 3), torch.zeros(2, device="meta")], ids=["empty", "meta"])
def test_tensors_without_elements_have_shape_and_dtype_only(tensor: torch.Tensor) -> None:
    """An empty tensor and one without contents are described, not an error."""
    found = tensor_statistics("t", tensor)
    assert found.minimum is None
    assert found.shape == tuple(tensor.shape)


def test_statistics_survive_json() -> None:
    """The record goes to JSON and back unchanged."""
    found = tensor_statistics("t", torch.tensor([1.0, INF]))
    assert type(found).model_validate_json(found.model_dump_json()) == found
    assert math.isfinite(found.mean or 0)


def _found(tensor: torch.Tensor) -> list[tuple[int, str]]:
    return [(finding.sample, finding.what) for finding in sample_findings("x", tensor)]


def test_names_samples_with_nan_inf_and_one_value() -> None:
    """Each odd row is named with what is odd about it; a row with NaN is not called constant as well."""
    images = torch.randn(6, 1, 4, 4)
    images[1] = NAN
    images[2, 0, 0, 0] = -INF
    images[4] = 0.25
    assert _found(images) == [(1, "nan"), (2, "inf"), (4, "constant")]
    details = [finding.detail for finding in sample_findings("x", images)]
    assert details[0] == "16 of 16 elements; 1 of 6 samples"
    assert details[2] == "all 16 elements are 0.25; 1 of 6 samples"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_findings_work_in_every_floating_dtype(dtype: torch.dtype) -> None:
    """A constant and a NaN sample are found whatever the precision."""
    batch = torch.arange(24.0).reshape(3, 8).to(dtype)
    batch[1] = 7
    batch[2, 3] = NAN
    assert _found(batch) == [(2, "nan"), (1, "constant")]


def test_masks_and_labels_are_not_called_constant() -> None:
    """A float mask of zeros and ones, integer labels and booleans have constant rows by right."""
    mask = torch.zeros(4, 1, 8, 8)
    mask[1, :, 2:5, 2:5] = 1
    assert _found(mask) == []
    assert _found(torch.zeros(4, 10, dtype=torch.int64)) == []
    assert _found(torch.zeros(4, 10, dtype=torch.bool)) == []


def test_samples_too_small_to_be_constant_are_passed_over() -> None:
    """Targets with one to three values per sample are not images."""
    assert _found(torch.tensor([[2.0, 2.0], [3.0, 3.0]])) == []
    assert _found(torch.tensor([2.0, NAN])) == [(1, "nan")]


def test_findings_are_bounded_and_the_total_is_told() -> None:
    """A batch full of NaN names the first few samples and says how many there are."""
    findings = sample_findings("x", torch.full((100, 4), NAN))
    assert len(findings) == MAX_FINDINGS
    assert findings[0].detail.endswith("100 of 100 samples")


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(NAN), torch.zeros(0, 3), torch.zeros(3, 0), torch.eye(3).to_sparse(), torch.ones(2, device="meta")],
    ids=["0-d", "no samples", "no elements", "sparse", "meta"],
)
def test_tensors_without_samples_have_no_findings(tensor: torch.Tensor) -> None:
    """What has no rows to speak of is passed over."""
    assert _found(tensor) == []
