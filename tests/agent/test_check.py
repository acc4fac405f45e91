"""Checks are exact: every floating dtype, every layout, however large the finite values are."""

from __future__ import annotations

import math
import random
import threading
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sentinel.wire.messages import Check
from sentinel_agent.check import NORM_FROM, Checker, check_one, is_nonfinite, large_norm, local_part, merged

WIDE = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
WITH_INF = [*WIDE, torch.float8_e5m2]
NAN, INF = float("nan"), float("inf")


def _look(tensor: Any) -> Check:
    found = Checker().check([tensor])
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW], ids=str)
def test_finite_values_give_their_largest_magnitude(dtype: torch.dtype) -> None:
    """A finite tensor counts nothing, and its absmax is the magnitude of its most negative element here."""
    assert _look(torch.tensor([0.5, -4.0, 2.0]).to(dtype)) == Check(3, 0, 0, 4.0)


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW], ids=str)
def test_nan_is_counted_in_every_floating_dtype(dtype: torch.dtype) -> None:
    """NaN among finite elements is counted, and the finite rest still gives absmax."""
    assert _look(torch.tensor([1.0, NAN, -2.0, NAN]).to(dtype)) == Check(4, 2, 0, 2.0)


@pytest.mark.parametrize("dtype", WITH_INF, ids=str)
def test_nan_and_infinities_are_counted_apart(dtype: torch.dtype) -> None:
    """One NaN, one +inf and two -inf are 1 and 3."""
    assert _look(torch.tensor([NAN, INF, -INF, -INF, 1.5]).to(dtype)) == Check(5, 1, 3, 1.5)


@pytest.mark.parametrize("dtype", WITH_INF, ids=str)
def test_minus_infinity_alone_is_seen(dtype: torch.dtype) -> None:
    """A tensor whose only nonfinite element is -inf is nonfinite, although its maximum is finite."""
    assert _look(torch.tensor([1.0, -INF, 3.0]).to(dtype)) == Check(3, 0, 1, 3.0)


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW], ids=str)
def test_the_largest_finite_values_are_finite(dtype: torch.dtype) -> None:
    """A tensor full of the dtype's largest value has an infinite sum and norm, and is finite all the same."""
    largest = torch.finfo(dtype).max
    tensor = torch.full((4096,), largest, dtype=torch.float64).to(dtype)
    tensor[::2] = tensor[::2].to(torch.float64).neg().to(dtype)
    assert _look(tensor) == Check(4096, 0, 0, largest)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_denormals_and_signed_zeros_are_finite(dtype: torch.dtype) -> None:
    """The smallest magnitudes do not vanish from absmax, and -0.0 is nothing special."""
    smallest = torch.finfo(dtype).smallest_normal
    assert _look(torch.tensor([-0.0, smallest, 0.0], dtype=torch.float64).to(dtype)) == Check(3, 0, 0, smallest)


def test_no_finite_element_gives_absmax_zero() -> None:
    """If all elements are nonfinite there is no magnitude to report."""
    assert _look(torch.tensor([NAN, INF])) == Check(2, 1, 1, 0.0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_parts_are_looked_at_one_by_one(dtype: torch.dtype) -> None:
    """A complex element counts as its two parts, so NaN in an imaginary part is not missed."""
    tensor = torch.tensor([complex(1, NAN), complex(-3, 0), complex(INF, 2)], dtype=torch.complex64).to(dtype)
    assert _look(tensor) == Check(6, 1, 1, 3.0)


def test_a_lazily_conjugated_tensor_is_checked() -> None:
    """Conjugation in torch is a flag that a real view refuses; the check must not."""
    assert _look(torch.tensor([complex(1, NAN), complex(-3, 4)]).conj()) == Check(4, 1, 0, 4.0)


def test_a_lazily_negated_tensor_is_checked() -> None:
    """The imaginary part of a conjugate carries a flag for its sign; its magnitude is the same."""
    assert _look(torch.tensor([complex(1, -7), complex(0, 2)]).conj().imag) == Check(2, 0, 0, 7.0)


def test_sparse_tensors_give_their_values() -> None:
    """Of a COO tensor the stored values are checked, coalesced or not."""
    indices = torch.tensor([[0, 3, 3], [1, 2, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([1.0, NAN, -9.0]), (5, 4), check_invariants=True)
    assert _look(sparse) == Check(3, 1, 0, 9.0)
    assert _look(sparse.coalesce()) == Check(2, 1, 0, 1.0)


def test_complex_sparse_values_are_checked() -> None:
    """Layout and dtype are taken apart one after the other."""
    values = torch.tensor([complex(0, INF)])
    sparse = torch.sparse_coo_tensor(torch.tensor([[2]]), values, (5,), check_invariants=True)
    assert _look(sparse) == Check(2, 0, 1, 0.0)


@pytest.mark.parametrize(
    "nothing",
    [
        torch.empty(0),
        torch.empty(3, 0),
        torch.tensor([1, 2]),
        torch.tensor(True),
        torch.zeros(2, device="meta"),
        torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.long), torch.empty(0), (5,), check_invariants=True),
        None,
        3.0,
    ],
    ids=["empty", "no columns", "integers", "bool", "meta", "no stored values", "none", "a number"],
)
def test_what_has_no_floating_elements_is_not_checked(nothing: Any) -> None:
    """Empty, integer and meta tensors, and what is no tensor, give no finding and are not counted."""
    checker = Checker()
    assert local_part(nothing) is None
    assert checker.check([nothing]) is None
    assert checker.count == 0
    assert not is_nonfinite(nothing)


def test_a_scalar_tensor_is_checked() -> None:
    """A tensor without dimensions is one element."""
    assert _look(torch.tensor(-INF)) == Check(1, 0, 1, 0.0)
    assert _look(torch.tensor(-2.5, dtype=torch.float16)) == Check(1, 0, 0, 2.5)


def test_strides_do_not_matter() -> None:
    """Transposed, sliced and expanded tensors are checked over their own elements only."""
    base = torch.arange(12.0).reshape(3, 4)
    base[1, 1] = NAN
    assert _look(base.t()) == Check(12, 1, 0, 11.0)
    assert _look(base[:, ::2]) == Check(6, 0, 0, 10.0)
    assert _look(torch.tensor([INF]).expand(100)) == Check(100, 0, 100, 0.0)


def test_parameters_and_tensors_with_a_history_are_checked_without_one() -> None:
    """The part that is looked at requires no gradient, so a check records nothing in the user's graph."""
    parameter = torch.nn.Parameter(torch.tensor([1.0, NAN]))
    for tensor in (parameter, parameter * 2):
        part = local_part(tensor)
        assert part is not None
        assert not part.requires_grad
        assert is_nonfinite(tensor)


def test_inference_tensors_are_checked() -> None:
    """A tensor made in inference mode is looked at like any other."""
    with torch.inference_mode():
        tensor = torch.tensor([NAN])
    assert is_nonfinite(tensor)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_a_dtensor_gives_its_local_shard(group: None, placement: Any) -> None:
    """Of a DTensor the shard on this rank is checked, without a collective."""
    mesh = init_device_mesh("cpu", (1,))
    tensor = distribute_tensor(torch.tensor([[1.0, NAN], [-5.0, 2.0]]), mesh, [placement])
    assert _look(tensor) == Check(4, 1, 0, 5.0)


def test_a_traced_tensor_is_left_alone() -> None:
    """A FakeTensor has no values to look at."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert local_part(torch.ones(3)) is None


def test_a_check_changes_nothing() -> None:
    """Values, version counter and RNG state are as they were, whether something is found or not."""
    tensor = torch.tensor([1.0, NAN, INF])
    before, version, rng = tensor.clone(), tensor._version, torch.get_rng_state()
    _look(tensor)
    assert torch.equal(tensor.nan_to_num(7.0), before.nan_to_num(7.0))
    assert tensor._version == version
    assert torch.equal(torch.get_rng_state(), rng)


def test_findings_over_several_tensors_are_merged() -> None:
    """Counts add up, absmax is the largest, and tensors that cannot be checked are passed over."""
    checker = Checker()
    found = checker.check([torch.tensor([1.0, NAN]), torch.tensor([3]), torch.tensor([INF, -8.0, 2.0])])
    assert found == Check(5, 1, 1, 8.0)
    assert checker.count == 2
    assert merged(Check(1, 0, 1, 2.0), Check(2, 1, 0, 1.0)) == Check(3, 1, 1, 2.0)


def test_random_tensors_agree_with_counting() -> None:
    """Over random shapes, dtypes and nonfinite places, a check says what plain counting says."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(60):
        dtype = draw.choice(WIDE)
        tensor = torch.randn(draw.randrange(1, 300), generator=generator).to(dtype)
        for value in (NAN, INF, -INF):
            for _ in range(draw.choice([0, 0, 1, 3])):
                tensor[draw.randrange(tensor.numel())] = value
        numbers = tensor.double().tolist()
        finite = [abs(n) for n in numbers if math.isfinite(n)]
        nan, inf = sum(map(math.isnan, numbers)), sum(map(math.isinf, numbers))
        assert check_one(tensor) == Check(len(numbers), nan, inf, max(finite, default=0.0)), (dtype, numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_nonfinite_element_of_a_large_tensor_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    """First, last and in between, at any offset in memory: the norm of a large tensor misses none."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(40):
        numel, offset = NORM_FROM + draw.randrange(1, 5000), draw.randrange(64)
        tensor = torch.randn(numel + offset).to(dtype)[offset:]
        tensor[draw.choice([0, numel - 1, draw.randrange(numel)])] = value
        assert not math.isfinite(large_norm(tensor))
        found = check_one(tensor)
        assert (found.nan, found.inf) == (int(math.isnan(value)), int(math.isinf(value)))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("shape", [(40_000,), (200, 200)], ids=str)
def test_the_norm_of_a_large_tensor_is_as_exact_as_float32(precision: str, shape: tuple[int, ...]) -> None:
    """Whatever precision the user wants for matrices, and however the tensor lies, ranks get the same norm to 1e-6."""
    tensor = torch.randn(shape)
    exact = torch.linalg.vector_norm(tensor.double()).item()
    torch.set_float32_matmul_precision(precision)
    try:
        assert large_norm(tensor) == pytest.approx(exact, rel=1e-6)
        assert large_norm(tensor.t()) == pytest.approx(exact, rel=1e-6)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("magnitude", [1e25, 1e-30])
def test_squares_that_overflow_or_underflow_are_no_finding(magnitude: float) -> None:
    """Where the norm can tell nothing, the elements themselves are looked at."""
    found = check_one(torch.full((NORM_FROM + 1,), magnitude))
    assert (found.nan, found.inf) == (0, 0)
    assert found.absmax == pytest.approx(magnitude)


def test_a_thread_that_is_not_the_training_s_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result is looked at on gloo's thread, where a parallel product would make a team of threads of its own."""
    tensor, calls = torch.ones(NORM_FROM + 1), []
    monkeypatch.setattr(
        torch, "dot", lambda one, other: calls.append(threading.current_thread()) or (one * other).sum()
    )
    for threads, used in ((1, True), (2, False)):
        calls.clear()
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        looking = threading.Thread(target=large_norm, args=(tensor,))
        looking.start()
        looking.join(30)
        assert bool(calls) is used
    calls.clear()
    assert large_norm(tensor) == pytest.approx((NORM_FROM + 1) ** 0.5)
    assert calls == [threading.main_thread()]
