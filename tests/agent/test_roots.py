"""Finding the modules that train: the outermost owners of an optimizer's parameters that can be called."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sentinel_agent import patching
from sentinel_agent.errors import Health
from sentinel_agent.roots import find_roots
from sentinel_agent.taps import batches
from sentinel_agent.window import Window


def _sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def test_the_outermost_owner_is_the_root() -> None:
    """Layers belong to their network, and a network to the module around it."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    outer = nn.Sequential(inner, nn.ReLU())
    assert find_roots(_sgd(inner)) == [outer]


def test_two_networks_of_one_optimizer_are_two_roots() -> None:
    """Roots come in the order of the optimizer's parameters."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert find_roots(_sgd(second, first)) == [second, first]


def test_a_container_that_cannot_be_called_gives_its_children() -> None:
    """A ModuleDict of two networks has no forward: the networks are the roots, and strangers in it are not."""
    nets = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Sequential(nn.Linear(2, 2)), "frozen": nn.Linear(2, 2)})
    assert find_roots(_sgd(nets["g"], nets["d"])) == [nets["g"], nets["d"]]


def test_parameters_that_no_module_owns_have_no_root() -> None:
    """Flat copies that a framework optimizes belong to nobody."""
    assert find_roots(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)) == []


def test_other_modules_are_not_roots() -> None:
    """A copy of the weights, and a module that shares none, are passed over."""
    model = nn.Linear(2, 2)
    others = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]
    assert find_roots(_sgd(model)) == [model]
    assert len(others) == 2


def test_a_module_that_contains_itself_ends() -> None:
    """A cycle of modules is walked once."""
    a, b = nn.Sequential(nn.Linear(2, 2)), nn.Sequential()
    a.add_module("b", b)
    b.add_module("a", a)
    assert find_roots(_sgd(a[0])) == []  # nothing is outermost
    del b.a


def test_an_uninitialised_module_is_passed_over() -> None:
    """A module whose constructor never ran does not disturb the search."""
    ghost = nn.Linear.__new__(nn.Linear)
    model = nn.Linear(2, 2)
    assert find_roots(_sgd(model)) == [model]
    assert vars(ghost) == {}


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_and_its_compiled_form_are_roots_and_caught_once(one_rank: None) -> None:
    """DDP is the root of its model, torch.compile(DDP) that of both; each forward, inner calls included, is caught once."""
    torch._dynamo.reset()
    window, health = Window(), Health(0, lambda _reason: None)
    batches.install_loader_tap(lambda: window, health.guarded)
    model = nn.Linear(2, 2)
    optimizer = _sgd(model)
    ddp = DistributedDataParallel(model)
    assert find_roots(optimizer) == [ddp]
    batches.watch_root(ddp)
    x = torch.ones(1, 2)
    ddp(x)
    assert len(window.entries(0)) == 1
    ddp.module(x)  # as a script does that forgets the wrapper
    assert len(window.entries(0)) == 2
    compiled = torch.compile(ddp, backend="aot_eager")
    assert find_roots(optimizer) == [compiled]
    compiled(x).sum().backward()
    assert len(window.entries(0)) == 3
    assert health.faults == {}
    batches.uninstall()
    patching.restore()


def test_a_search_breaks_no_tuple_that_another_thread_is_filling() -> None:
    """``tuple(generator)`` fails if anybody holds the tuple meanwhile; a walk over all objects must not, at any of its steps."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stop, failures, filled = threading.Event(), list[BaseException](), 0

    def fill() -> None:
        nonlocal filled
        while not stop.is_set():
            try:
                tuple(number for number in range(2000))
                filled += 1
            except SystemError as failure:
                failures.append(failure)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for _ in range(30):
            assert find_roots(optimizer) == [model]
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert filled > 0
    assert failures == []
