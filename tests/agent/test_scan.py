"""Named looks at the state of the training: which parameters, gradients and buffers are nonfinite, and which were cleared."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched import Watched

from sentinel.wire.messages import AT_START, Phase
from sentinel_agent.naming import Naming
from sentinel_agent.scan import MAX_NAMES, Scan

NAN, INF = float("nan"), float("inf")


def _scan(*models: nn.Module) -> Scan:
    naming = Naming()
    for model in models:
        model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[assignment] # as long as the model
        naming.add_root(model)
        naming.add_optimizer(model.optimizer)  # type: ignore[arg-type]
    return Scan(naming)


def _with_gradients(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def test_nonfinite_parameters_are_named() -> None:
    """The names are the user's, the counts are over all of them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].weight[0, 1] = NAN
        model[1].bias[0] = INF
    found = _scan(model).parameters()
    assert found.nonfinite
    assert (found.names, found.total) == (("1.weight", "1.bias"), 2)
    assert (found.found.numel, found.found.nan, found.found.inf) == (12, 1, 1)


def test_names_are_limited_and_counted() -> None:
    """Of very many nonfinite tensors only some are named, all are counted."""
    model = nn.ParameterList([nn.Parameter(torch.tensor([NAN])) for _ in range(MAX_NAMES + 5)])
    found = _scan(model).parameters()
    assert len(found.names) == MAX_NAMES == 32
    assert found.total == MAX_NAMES + 5


def test_gradients_are_looked_at_where_there_are_any() -> None:
    """A parameter without a gradient is passed over."""
    model = nn.Linear(2, 2)
    model.weight.grad = torch.full((2, 2), INF)
    found = _scan(model).gradients()
    assert (found.names, found.found.inf) == (("weight",), 4)


def test_a_sound_start_finds_nothing() -> None:
    """A freshly made model has nothing nonfinite."""
    assert not _scan(nn.Linear(2, 2)).start().nonfinite


def test_nan_in_a_frozen_parameter_is_found_at_the_start() -> None:
    """NaN is never meant."""
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)[0, 0] = NAN
    assert _scan(model).start().names == ("weight",)


def test_a_mask_kept_as_a_frozen_parameter_is_meant() -> None:
    """-inf in a parameter that is not trained is an attention mask, no accident."""
    model = nn.Linear(2, 2)
    model.mask = nn.Parameter(torch.full((3, 3), -INF).triu(1), requires_grad=False)
    assert not _scan(model).start().nonfinite


def test_a_lazy_parameter_has_nothing_to_look_at_yet() -> None:
    """Before the first forward the weights of a lazy layer do not exist."""
    assert not _scan(nn.LazyLinear(3)).start().nonfinite


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_freed_parameter_is_passed_over() -> None:
    """Sharded training shrinks storages that parameters still refer to: nothing is left to read, and reading may crash."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias[0] = NAN
    scan = _scan(model)
    model.weight.untyped_storage().resize_(0)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(RuntimeError):
            os._exit(int(scan.parameters().names != ("bias",)))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_a_mask_kept_as_a_buffer_is_meant() -> None:
    """A buffer that held -inf when the training began is not reported later; one that has become nonfinite is."""
    model = nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
    scan = _scan(model)
    scan.remember_buffers()
    assert not scan.buffers().nonfinite
    model.running_mean[0] = NAN
    assert scan.buffers().names == ("running_mean",)


def test_nan_in_a_masked_buffer_is_found() -> None:
    """Where -inf is meant, NaN is not."""
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.tensor([-INF, 0.0]))
    scan = _scan(model)
    scan.remember_buffers()
    model.mask[1] = NAN
    assert scan.buffers().names == ("mask",)


# --- were the gradients cleared? ---------------------------------------------------------------------------------------


def test_nothing_remembered_is_not_cleared() -> None:
    """Before the first backward there is nothing that could have been cleared."""
    assert not _scan(nn.Linear(2, 2)).cleared()


@pytest.mark.parametrize("clear", [lambda p: setattr(p, "grad", None), lambda p: p.grad.zero_()], ids=["none", "zero"])
def test_cleared_gradients_are_recognised(clear: Any) -> None:
    """Gradients that are gone, or zero since they were written, are cleared; only some of them are not enough."""
    model = _with_gradients(nn.Linear(2, 2))
    scan = _scan(model)
    scan.remember_gradients()
    assert not scan.cleared()
    clear(model.weight)
    assert not scan.cleared()
    clear(model.bias)
    assert scan.cleared()


def test_gradients_that_were_zero_from_the_start_are_not_cleared() -> None:
    """A backward that gives zeros, as with a dead activation, is no clearing."""
    model = _with_gradients(nn.Linear(2, 2))
    model.zero_grad(set_to_none=False)
    scan = _scan(model)
    scan.remember_gradients()
    assert not scan.cleared()


def test_gradients_replaced_by_others_are_not_cleared() -> None:
    """A new tensor in ``.grad`` that holds something is a gradient."""
    model = _with_gradients(nn.Linear(2, 2))
    scan = _scan(model)
    scan.remember_gradients()
    _with_gradients(model)
    assert not scan.cleared()


def test_a_model_that_is_gone_is_over() -> None:
    """Sampled gradients are not kept alive, and a model that is gone, with nothing else trained, leaves none uncleared."""
    model = _with_gradients(nn.Linear(2, 2))
    scan = _scan(model)
    scan.remember_gradients()
    assert not scan.cleared()
    del model
    assert scan.cleared()


def test_parameters_that_are_replaced_are_not_over() -> None:
    """A wrapper may make its parameters anew while the model lives: that says nothing of their gradients."""
    model = _with_gradients(nn.Linear(2, 2))
    scan = _scan(model)
    scan.remember_gradients()
    model.weight, model.bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    assert not scan.cleared()


def test_sparse_gradients_can_be_cleared() -> None:
    """An embedding's sparse gradient that was set to None or zeroed is cleared."""
    model = nn.Embedding(5, 2, sparse=True)
    scan = _scan(model)
    model(torch.tensor([1, 1])).sum().backward()
    scan.remember_gradients()
    assert not scan.cleared()
    model.zero_grad()
    assert scan.cleared()


def test_sparse_gradients_can_be_zeroed() -> None:
    """``zero_grad(set_to_none=False)`` empties a sparse gradient."""
    model = nn.Embedding(5, 2, sparse=True)
    scan = _scan(model)
    model(torch.tensor([1, 1])).sum().backward()
    scan.remember_gradients()
    model.zero_grad(set_to_none=False)
    assert scan.cleared()


# --- who is behind a nonfinite bucket? ---------------------------------------------------------------------------------


def test_only_the_bucket_s_own_gradients_are_named(watched: Watched) -> None:
    """One parameter's NaN is that parameter's, although its neighbours share the bucket."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1)))
    watched.agent.root_made(model)
    model.module[1].weight.register_hook(lambda grad: torch.full_like(grad, NAN))
    model(torch.ones(1, 3)).sum().backward()
    (wire,) = watched.evidence(Phase.WIRE)
    assert (wire.parameters, wire.parameters_total) == (("1.weight",), 1)
    assert wire.collective is not None
    assert wire.collective.raw is not None
    assert wire.collective.raw.nan == wire.check.nan == 4
    assert not wire.collective.narrowed


def test_a_cast_that_overflows_has_finite_gradients_behind_it(watched: Watched) -> None:
    """Gradients beyond the wire's dtype: the wire is inf, what autograd left is finite, and the wire is narrower."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(nn.Linear(3, 1))
    watched.agent.root_made(model)
    model.register_comm_hook(None, fp16_compress_hook)
    (model(torch.ones(1, 3)).sum() * 1e6).backward()
    (wire,) = watched.evidence(Phase.WIRE)
    assert wire.check.inf == 4
    assert wire.collective is not None
    assert wire.collective.raw is not None
    assert not wire.collective.raw.nonfinite
    assert wire.collective.narrowed
    assert wire.parameters == ()


def test_nan_in_a_sparse_gradient_is_named(watched: Watched) -> None:
    """DDP reduces an embedding's sparse gradient by itself; NaN in it is found like any other."""
    watched.expects_faults = True  # asserted on below
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1)))
    watched.agent.root_made(model)
    model.module[0].weight.register_hook(lambda grad: grad * NAN)
    model(torch.tensor([1, 4])).sum().backward()
    assert not watched.faults
    assert [e.parameters for e in watched.evidence(Phase.WIRE)] == [("0.weight",)]


def test_nan_next_to_a_sparse_gradient_is_named(watched: Watched) -> None:
    """A sparse gradient that is there when a dense bucket goes bad does not hide it."""
    watched.expects_faults = True  # asserted on below
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1))
    watched.agent.root_made(model)
    (model(torch.tensor([1, 4])).sum() * NAN).backward()
    dist.all_reduce(model[1].weight.grad)
    assert not watched.faults
    assert "1.weight" in watched.evidence(Phase.WIRE)[0].parameters


class Shifted(nn.Module):
    """Adds a buffer, or only has it."""

    def __init__(self, value: float, *, used: bool) -> None:
        super().__init__()
        self.linear, self.used = nn.Linear(2, 1), used
        self.register_buffer("shift", torch.tensor([0.0, value]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Finite unless the buffer is used and is not."""
        return self.linear(rows + self.shift if self.used else rows)


@pytest.mark.parametrize(
    ("value", "used", "told"),
    [(float("nan"), True, 1), (float("nan"), False, 0), (float("-inf"), True, 0)],
    ids=["used", "unused", "a mask's infinity"],
)
def test_buffers_that_begin_with_nan_are_told_if_it_shows(
    watched: Watched, value: float, used: bool, told: int
) -> None:
    """NaN in a buffer before the first forward is told with the first round's nonfinite loss, not for its own sake."""
    model = Shifted(value, used=used)
    watched.agent.root_made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    started = [e for e in watched.evidence(Phase.BUFFERS) if e.note == AT_START]
    assert [e.parameters for e in started] == [("shift",)] * told


def test_a_scaler_s_first_overflow_is_not_the_buffer_s_fault(watched: Watched) -> None:
    """A GradScaler that still looks for its scale skips round 0 with a finite loss, whatever a buffer holds that nothing reads."""
    model = Shifted(float("nan"), used=False)
    watched.agent.root_made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(model(torch.ones(1, 2)).sum() * 1e3).backward()
    dist.all_reduce(model.linear.weight.grad)
    scaler.step(optimizer)
    assert not [e for e in watched.evidence(Phase.BUFFERS) if e.note == AT_START]
