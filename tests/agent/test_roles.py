"""Whose reduction it is: every way a gradient is reduced is a gradient's, and nothing else is.

Each test puts NaN through a real collective and reads the role from the evidence that the agent sends.
"""

from __future__ import annotations

import _thread
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from relay_client import wait_until
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from watched import Watched

from sentinel.wire.messages import Phase, Role
from sentinel_agent import roles

NAN = float("nan")


def _roles(watched: Watched) -> list[Role]:
    return [e.collective.role for e in watched.evidence(Phase.WIRE) if e.collective is not None]


def _net(width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4), nn.Linear(4, 1))


def _backward(model: nn.Module, value: float = NAN, width: int = 3) -> None:
    model(torch.full((2, width), value)).square().sum().backward()


@pytest.fixture
def trained(watched: Watched) -> nn.Sequential:
    """A model and its optimizer, met by the agent, with nonfinite gradients."""
    model = _net()
    watched.agent.root_made(model)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[assignment]
    _backward(model)
    return model


def test_ddp_s_own_reducer_reduces_gradients(watched: Watched) -> None:
    """The C++ reducer is called straight from the autograd engine."""
    model = DistributedDataParallel(_net())
    watched.agent.root_made(model)
    _backward(model)
    assert _roles(watched) == [Role.GRADIENT]
    assert watched.evidence(Phase.WIRE)[0].parameters == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert not watched.faults


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_gradient_is_a_gradient_in_any_dtype(watched: Watched, dtype: torch.dtype) -> None:
    """A model in double precision is not taken for a bundle of norms."""
    model = DistributedDataParallel(_net().to(dtype))
    model(torch.full((2, 3), NAN, dtype=dtype)).sum().backward()
    assert _roles(watched) == [Role.GRADIENT]


def test_the_comm_hooks_of_torch_reduce_gradients(watched: Watched) -> None:
    """A hook from torch's library issues the collective from Python, inside backward."""
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        model = DistributedDataParallel(_net())
        model.register_comm_hook(dist.group.WORLD, hook)
        _backward(model)
    assert _roles(watched) == [Role.GRADIENT, Role.GRADIENT]


def _users_hook(state, bucket):  # type: ignore[no-untyped-def]
    compressed = bucket.buffer().to(torch.float16)
    future = dist.all_reduce(compressed, async_op=True).get_future()
    return future.then(lambda f: f.value()[0].to(torch.float32))  # type: ignore[no-any-return]


def test_a_comm_hook_of_the_user_s_reduces_gradients(watched: Watched) -> None:
    """The user's own compression hook over one bucket."""
    model = DistributedDataParallel(_net())
    watched.agent.root_made(model)
    model.register_comm_hook(None, _users_hook)
    _backward(model)
    assert _roles(watched) == [Role.GRADIENT]


def test_a_comm_hook_of_the_user_s_reduces_gradients_over_several_buckets(watched: Watched) -> None:
    """After the first iteration a large model has several buckets; none of them holds all gradients."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600)), bucket_cap_mb=1)
    watched.agent.root_made(model)
    model.register_comm_hook(None, _users_hook)
    _backward(model, 1.0, width=600)
    _backward(model, NAN, width=600)
    assert len(_roles(watched)) > 1
    assert set(_roles(watched)) == {Role.GRADIENT}


def test_a_loop_over_gradients_after_backward_reduces_gradients(watched: Watched, trained: nn.Sequential) -> None:
    """Hand-written data parallelism: one all-reduce for each parameter, a bias of one element included."""
    for parameter in trained.parameters():
        dist.all_reduce(parameter.grad)
    assert _roles(watched) == [Role.GRADIENT] * 4


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_one_flat_copy_of_all_gradients_is_a_gradient(watched: Watched, trained: nn.Sequential) -> None:
    """Gradients flattened into one new tensor after backward, in their own precision or a narrower one."""
    dist.all_reduce(_flat(trained))
    dist.all_reduce(_flat(trained).to(torch.float16))
    assert _roles(watched) == [Role.GRADIENT, Role.GRADIENT]


def test_copies_with_the_shapes_of_parameters_are_gradients(watched: Watched, trained: nn.Sequential) -> None:
    """Each gradient cast to a narrower dtype before it is reduced; only that of one element could be a mere number."""
    for parameter in trained.parameters():
        dist.all_reduce(parameter.grad.to(torch.bfloat16))
    assert _roles(watched)[:3] == [Role.GRADIENT] * 3


def test_part_of_the_gradients_after_backward_is_derived(watched: Watched, trained: nn.Sequential) -> None:
    """A tensor of no known layout after backward was computed from gradients: a partial sum, a factor of a compression."""
    dist.all_reduce(_flat(trained)[:5].clone())
    assert _roles(watched) == [Role.DERIVED]


def test_norms_losses_and_flags_are_scalars(watched: Watched, trained: nn.Sequential) -> None:
    """One element, or double precision in a single precision model: statistics of the training, no gradient."""
    dist.all_reduce(torch.tensor(NAN))
    dist.all_reduce(torch.tensor([NAN]))
    dist.all_reduce(torch.tensor([NAN, 1.0, 2.0], dtype=torch.float64))
    assert _roles(watched) == [Role.SCALAR] * 3


def test_integers_are_not_looked_at(watched: Watched, trained: nn.Sequential) -> None:
    """Counts cannot be nonfinite."""
    before = watched.agent.checker.count
    dist.all_reduce(torch.tensor([1, 2]))
    assert watched.agent.checker.count == before


def test_a_maximum_is_no_gradient_s(watched: Watched, trained: nn.Sequential) -> None:
    """Nobody takes the maximum of gradients over ranks to step with it: ranges for quantisation, statistics."""
    dist.all_reduce(trained[0].weight.grad.clone(), dist.ReduceOp.MAX)
    dist.all_reduce(trained[0].weight.grad.clone(), dist.ReduceOp.MIN)
    dist.all_reduce(torch.tensor(NAN), dist.ReduceOp.MAX)
    assert _roles(watched) == [Role.ACTIVATION, Role.ACTIVATION, Role.SCALAR]


def test_a_reduction_before_any_backward_is_an_activation(watched: Watched) -> None:
    """In a forward there are no gradients yet, whatever the shape."""
    model = _net()
    watched.agent.root_made(model)
    dist.all_reduce(torch.full_like(model[0].weight, NAN))
    assert _roles(watched) == [Role.ACTIVATION]


class Summed(torch.autograd.Function):
    """Statistics shared over ranks in forward and backward, as synchronised normalisation does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Reduce the activations."""
        total = x.detach().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Reduce their gradients."""
        total = grad.clone()
        dist.all_reduce(total)
        return total


class Synchronised(nn.Module):
    """A layer between two others that shares its activations over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 7), nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outer layers around the synchronised one."""
        return self.second(Summed.apply(self.first(x)))


def test_a_layer_that_reduces_in_its_forward_reduces_activations(watched: Watched) -> None:
    """Synchronised statistics are evidence about the forward."""
    model = Synchronised()
    watched.agent.root_made(model)
    model(torch.full((2, 3), NAN))
    assert _roles(watched) == [Role.ACTIVATION]


def test_the_second_forward_of_an_accumulation_reduces_activations(watched: Watched) -> None:
    """That a backward of the same round is over does not make the next forward's statistics something of gradients."""
    model = Synchronised()
    watched.agent.root_made(model)
    model(torch.ones(2, 3)).sum().backward()
    model(torch.full((2, 3), NAN))
    assert _roles(watched) == [Role.ACTIVATION]


def test_a_layer_that_reduces_in_its_backward_reduces_activations(watched: Watched) -> None:
    """The gradient of an activation is no parameter's gradient."""
    model = Synchronised()
    watched.agent.root_made(model)
    output = model(torch.ones(2, 3))
    output.backward(torch.full_like(output, NAN))
    assert Role.ACTIVATION in _roles(watched)
    assert Role.DERIVED not in _roles(watched)


@pytest.mark.parametrize(
    "register",
    [
        lambda p: p.register_hook(lambda grad: _reduced(grad)),
        lambda p: p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad)),
    ],
    ids=["tensor hook", "post-accumulate hook"],
)
def test_hooks_on_parameters_reduce_gradients(watched: Watched, register: Callable[[Any], Any]) -> None:
    """A user who reduces each gradient as soon as it is there does it inside backward."""
    model = _net()
    watched.agent.root_made(model)
    for parameter in model[:1].parameters():
        register(parameter)
    _backward(model)
    assert _roles(watched) == [Role.GRADIENT, Role.GRADIENT]


def _reduced(grad: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(grad)
    return grad


def test_an_evaluation_between_steps_reduces_scalars_and_activations(watched: Watched, trained: nn.Sequential) -> None:
    """After the step a new round has begun: a validation's sums are not taken for gradients."""
    trained.optimizer.step()  # type: ignore[operator, union-attr]
    watched.reports.clear()
    dist.all_reduce(torch.tensor([NAN, 3.0, 1.0, 1.0, 1.0]))
    assert _roles(watched) == [Role.ACTIVATION]


def test_a_kernel_called_by_no_python_code_is_called_by_autograd() -> None:
    """On an accelerator backward runs on threads of the engine's own, where no Python frame is above the reducer's call."""
    found: list[roles.Caller] = []
    kernel = {"caller": roles.caller}
    exec(compile("def kernel(): return caller()", "/site-packages/sentinel_agent/taps/wire.py", "exec"), kernel)
    _thread.start_new_thread(found.extend, (itertools.starmap(kernel["kernel"], [()]),))
    wait_until(lambda: found, "the kernel was called")
    assert found == [roles.Caller.AUTOGRAD]


def test_the_caller_is_told_by_its_file() -> None:
    """Code of torch's that only passes a call on is looked through; what is left is torch's engine, a hook, a layer, or a user."""
    told = {
        "/site-packages/torch/autograd/graph.py": roles.Caller.AUTOGRAD,
        "/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py": roles.Caller.GRADIENT_HOOK,
        "/site-packages/torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py": roles.Caller.GRADIENT_HOOK,
        "/site-packages/torch/nn/modules/_functions.py": roles.Caller.ACTIVATION,
        "/site-packages/torch/distributed/distributed_c10d.py": None,
        "/site-packages/sentinel_agent/taps/wire.py": None,
        "/home/ada/train.py": roles.Caller.USER,
        "C:\\torch\\autograd\\graph.py": roles.Caller.AUTOGRAD,
    }
    assert {name: roles._of_file(name) for name in told} == told


def test_an_evaluation_in_inference_mode_reduces_what_it_likes(watched: Watched, trained: nn.Sequential) -> None:
    """Its tensors have no versions to look at, and asynchronous reductions of them are no fault (which the fixture asserts)."""
    with torch.inference_mode():
        for value in (torch.ones(()), torch.ones(64)):
            dist.all_reduce(value, async_op=True).wait()
    assert watched.agent.health.active


def test_a_parameter_that_was_unfrozen_is_noticed() -> None:
    """One that was not trained when the shapes were learnt, and gets gradients now; a model that is gone is forgotten."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    layouts = roles.Layouts()
    layouts.learn(model.named_parameters())
    assert not layouts.outdated()
    model[0].bias.requires_grad_(True)
    assert layouts.outdated()
    layouts.learn(model.named_parameters())
    assert not layouts.outdated()
    assert [name for name, _ in layouts.parameters()] == ["0.bias", "1.weight", "1.bias"]
    model[0].weight.requires_grad_(True)
    del model
    assert not layouts.outdated()
