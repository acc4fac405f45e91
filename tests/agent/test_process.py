"""How the agent gets into a process and out of it: once, early or late, and without a trace."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.fsdp._fully_shard._fsdp_param_group
import torch.distributed.fsdp._fully_shard._fully_shard as sharding
import torch.jit._script
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import dataloader
from watched import Watched

import sentinel_agent
from sentinel.wire.messages import Goodbye, Hello
from sentinel_agent import process
from sentinel_agent.naming import Naming

pytestmark = pytest.mark.usefixtures("fresh_process")


def _current() -> Watched:
    agent = process.current()
    assert agent is not None
    return Watched.over(agent)


def _names(watched: Watched) -> list[str]:
    return [name for name, _ in watched.agent.naming.parameters()]


def _step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()


def _init() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


# --- in ----------------------------------------------------------------------------------------------------------------


def test_attached_before_the_process_group_it_starts_with_it() -> None:
    """There is no agent until the rank is known, and one right after."""
    sentinel_agent.attach(dump_level="stats", goodbye_seconds=0.0)
    assert process.current() is None
    assert process.health() is None
    _init()
    try:
        watched = _current()
        assert watched.agent.config.dump_level == "stats"
        assert watched.agent.me.world_size == 1
        assert process.health() is watched.agent.health
        _step(DistributedDataParallel(nn.Linear(2, 1)))
        assert watched.steps == [0]
    finally:
        dist.destroy_process_group()


def test_attached_late_it_starts_at_once(group: None) -> None:
    """After ``init_process_group``, and before the model is wrapped, everything is seen."""
    sentinel_agent.attach(goodbye_seconds=0.0)
    watched = _current()
    model = DistributedDataParallel(nn.Linear(2, 1))
    _step(model)
    assert _names(watched) == ["weight", "bias"]
    assert watched.steps == [0]
    assert not watched.faults


def test_attaching_twice_changes_nothing(group: None) -> None:
    """A second call, with whatever options, leaves the first agent in place."""
    sentinel_agent.attach(goodbye_seconds=0.0, dump_level="stats")
    first = process.current()
    sentinel_agent.attach(dump_level="batch")
    assert process.current() is first
    assert first is not None
    assert first.config.dump_level == "stats"


def test_an_unknown_option_is_an_error(group: None) -> None:
    """A misspelt option is told, and nothing is attached."""
    with pytest.raises(TypeError, match="dump_lvl"):
        sentinel_agent.attach(dump_lvl="stats")
    assert process.current() is None
    sentinel_agent.attach(goodbye_seconds=0.0)
    assert process.current() is not None


def test_a_second_process_group_keeps_the_agent(group: None) -> None:
    """A script that destroys its group and makes another is watched by the same agent."""
    sentinel_agent.attach(goodbye_seconds=0.0)
    watched = _current()
    dist.destroy_process_group()
    _init()
    assert process.current() is watched.agent
    _step(DistributedDataParallel(nn.Linear(2, 1)))
    assert watched.steps == [0]


def test_modules_made_before_the_group_are_handed_over() -> None:
    """A compiled module exists before the process group, and the agent that comes with the group knows it."""
    sentinel_agent.attach(goodbye_seconds=0.0)
    model = torch.compile(nn.Linear(2, 1), backend="eager")
    _init()
    try:
        watched = _current()
        assert _names(watched) == ["weight", "bias"]
        assert model is not None
    finally:
        dist.destroy_process_group()


def test_modules_are_not_kept_alive_for_a_group_that_never_comes() -> None:
    """In a process without a process group, compiled models that the user drops are freed."""
    sentinel_agent.attach()
    model = nn.Linear(2, 1)
    torch.compile(model, backend="eager")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_an_agent_that_cannot_start_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is wrong with the agent, the process group is made and the training goes on."""
    sentinel_agent.attach()
    monkeypatch.setattr("sentinel_agent.agent.Agent.start", lambda _self: 1 / 0)
    _init()
    try:
        assert dist.is_initialized()
        assert process.current() is None
        _step(DistributedDataParallel(nn.Linear(2, 1)))
    finally:
        dist.destroy_process_group()
    printed = capsys.readouterr().err
    assert printed.startswith("sentinel: agent could not start")
    assert printed.count("\n") == 1


def _broken(*_args: Any) -> None:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: sharding.fully_shard(model),
    ],
    ids=["ddp", "compile", "fully_shard"],
)
def test_a_fault_at_a_wrapper_does_not_reach_the_script(
    group: None, monkeypatch: pytest.MonkeyPatch, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    """If the agent fails on a new wrapper, the script has its wrapper and the fault is counted."""
    sentinel_agent.attach(goodbye_seconds=0.0)
    watched = _current()
    monkeypatch.setattr(Naming, "add_root", _broken)
    wrap(nn.Linear(2, 1))
    assert sum(watched.faults.values()) == 1


def test_several_modules_can_be_sharded_as_one_group(group: None) -> None:
    """``fully_shard`` takes a list of modules: the script gets what torch returns."""
    sentinel_agent.attach(goodbye_seconds=0.0)
    layers = [nn.Linear(2, 2), nn.Linear(2, 1)]
    assert sharding.fully_shard(layers) is layers


def test_attached_late_it_knows_what_is_sharded(group: None) -> None:
    """Where FSDP was imported before the attach, ``torch.distributed.fsdp.fully_shard`` tells of its module all the same."""
    sentinel_agent.attach(goodbye_seconds=0.0)
    watched = _current()
    model = torch.distributed.fsdp.fully_shard(nn.Linear(2, 1))
    assert _names(watched) == ["weight", "bias"]
    assert model is not None


# --- out ---------------------------------------------------------------------------------------------------------------

PLACES: dict[str, Callable[[], Any]] = {
    "init_process_group": lambda: dist.distributed_c10d.init_process_group,
    "DistributedDataParallel": lambda: DistributedDataParallel.__init__,
    "FullyShardedDataParallel": lambda: torch.distributed.fsdp.FullyShardedDataParallel.__init__,
    "OptimizedModule": lambda: torch._dynamo.eval_frame.OptimizedModule.__init__,
    "fully_shard": lambda: sharding.fully_shard,
    "Optimizer": lambda: torch.optim.Optimizer.__init__,
    "optimizer hooks": lambda: tuple(_global_optimizer_pre_hooks.values()),
    "GradScaler.step": lambda: torch.amp.GradScaler.step,
    "GradScaler.scale": lambda: torch.amp.GradScaler.scale,
    "GradScaler.unscale_": lambda: torch.amp.GradScaler.unscale_,
    "backward": lambda: torch.autograd.backward,
    "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_,
    "clip_grad.clip_grad_norm_": lambda: nn.utils.clip_grad.clip_grad_norm_,
    "clip_grad_value_": lambda: nn.utils.clip_grad_value_,
    "loader": lambda: dataloader._BaseDataLoaderIter.__next__,
    "loader indices": lambda: dataloader._BaseDataLoaderIter._next_index,
    "__getstate__": lambda: nn.Module.__getstate__,
    "script": lambda: torch.jit._script._script_impl,
    "compile": lambda: torch.compile,
    "sys.exit": lambda: sys.exit,
    "sys.excepthook": lambda: sys.excepthook,
}
OTHER_NAMES: dict[str, Callable[[], Any]] = {
    "the package's init_process_group": lambda: dist.init_process_group,
    "foreach_reduce": lambda: torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_reduce,
    "a name that Module inherits": lambda: "__getstate__" in vars(nn.Module),
}
ALL = [pytest.param(place, id=name) for name, place in {**PLACES, **OTHER_NAMES}.items()]


@pytest.mark.parametrize("place", ALL)
def test_detach_leaves_torch_as_it_was(group: None, place: Callable[[], Any]) -> None:
    """After attach, training and detach, each function is the identical object of before."""
    before = place()
    sentinel_agent.attach(goodbye_seconds=0.0)
    _current()
    _step(DistributedDataParallel(nn.Linear(2, 1)))
    sentinel_agent.detach()
    assert place() is before or place() == before


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_attach_is_where_it_is_thought_to_be(group: None, place: Callable[[], Any]) -> None:
    """Each of these places is really changed while the agent is attached, so that the test of detach means something."""
    before = place()
    sentinel_agent.attach(goodbye_seconds=0.0)
    DistributedDataParallel(nn.Linear(2, 1))
    assert place() is not before


def test_a_model_is_as_it_was_after_detach(group: None) -> None:
    """No hook of ours stays on a module, and it trains on."""
    model = DistributedDataParallel(nn.Linear(2, 1))
    hooks = [dict(vars(module)) for module in model.modules()]
    sentinel_agent.attach(goodbye_seconds=0.0)
    watched = _current()
    watched.agent.root_made(model)
    _step(model)
    assert any(module._forward_pre_hooks for module in model.modules())
    sentinel_agent.detach()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert [set(vars(module)) for module in model.modules()] == [set(before) for before in hooks]
    reports = len(watched.reports)
    _step(model)
    assert len(watched.reports) == reports


def test_detach_says_goodbye(group: None) -> None:
    """The open round is closed and the last report is a clean goodbye."""
    sentinel_agent.attach(goodbye_seconds=0.0)
    agent = process.current()
    assert agent is not None
    assert isinstance(agent.channel._handed[0], Hello)
    _step(DistributedDataParallel(nn.Linear(2, 1)))
    sentinel_agent.detach()
    bye = agent.channel._handed[-1]
    assert isinstance(bye, Goodbye)
    assert bye.clean
    assert bye.last_round == 0
    assert process.current() is None


def test_detach_without_attach_is_harmless() -> None:
    """A script may detach in its cleanup whether it attached or not."""
    sentinel_agent.detach()
    sentinel_agent.detach()
    assert process.current() is None


def test_detach_before_the_process_group_takes_the_taps_out() -> None:
    """Attached and detached again before any process group, torch is as it was and stays unwatched."""
    before = DistributedDataParallel.__init__
    sentinel_agent.attach()
    sentinel_agent.detach()
    assert DistributedDataParallel.__init__ is before


def test_attaching_again_after_detach_watches_again(group: None) -> None:
    """A notebook may attach and detach as often as it likes."""
    sentinel_agent.attach(goodbye_seconds=0.0)
    sentinel_agent.detach()
    sentinel_agent.attach(goodbye_seconds=0.0)
    watched = _current()
    wrapper = DistributedDataParallel(model := nn.Linear(2, 1))
    assert _names(watched) == [name for name, _ in model.named_parameters()]
    assert wrapper.module is model


def test_after_detach_a_new_process_group_is_not_watched(group: None) -> None:
    """Detached means detached: another process group makes no new agent."""
    sentinel_agent.attach(goodbye_seconds=0.0)
    sentinel_agent.detach()
    dist.destroy_process_group()
    _init()
    assert process.current() is None


def test_importing_the_package_does_not_import_torch(tmp_path: Path) -> None:
    """Child processes that never train import it too; ``attach`` is found when it is asked for."""
    script = "import sys, sentinel_agent; assert 'torch' not in sys.modules; assert callable(sentinel_agent.attach)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_the_package_has_three_names() -> None:
    """What users import is attach, detach, and what a halting guard raises; anything else is an error as usual."""
    assert sentinel_agent.__all__ == ["NonFiniteGradientError", "attach", "detach"]
    assert issubclass(sentinel_agent.NonFiniteGradientError, RuntimeError)
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        _ = sentinel_agent.atach  # type: ignore[attr-defined]
