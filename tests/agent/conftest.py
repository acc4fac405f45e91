"""What tests of the agent share: a process group of one, and an agent whose reports are kept in a list."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
from watched import Watched

from sentinel_agent import patching, process
from sentinel_agent.agent import Agent
from sentinel_agent.config import AgentConfig
from sentinel_agent.inject import hooks, lazy


@pytest.fixture
def group() -> Iterator[None]:
    """A default process group of this process alone, over gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        # gloo's threads may still wait for the GIL to let go of Python objects; a group that is taken apart under the GIL waits
        # for those threads. While this barrier waits they have it.
        dist.barrier()
        dist.destroy_process_group()


@pytest.fixture
def watch(group: None, tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Start an agent with these fields of AgentConfig; its taps are taken out after the test."""
    started: list[Watched] = []

    def start(**options: Any) -> Watched:
        config = AgentConfig(**{"run_dir": tmp_path, "dump_level": "stats", "goodbye_seconds": 0.0, **options})
        watched = Watched.over(Agent(config, rank=0, world_size=1))
        started.append(watched)
        watched.agent.start()
        return watched

    yield start
    for watched in started:
        watched.agent.stop()
    assert [w.faults for w in started if w.faults and not w.expects_faults] == []


@pytest.fixture
def watched(watch: Callable[..., Watched]) -> Watched:
    """A started agent with default settings."""
    torch.manual_seed(0)
    return watch()


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The agent's modules as they are in a process where nothing was attached yet, and again after the test."""
    monkeypatch.setenv("SENTINEL_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(process, "_agent", None)
    monkeypatch.setattr(process, "_config", None)
    monkeypatch.setattr(process, "_roots", [])
    monkeypatch.setattr(hooks, "_prepared", False)
    # Names that detach should put back by itself; see test_process.py for those it does not.
    names = [(dist, "init_process_group"), (param_group, "foreach_reduce")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in names]
    yield
    process.detach()
    patching.restore()
    for owner, name, original in originals:
        setattr(owner, name, original)
    if "__getstate__" in vars(torch.nn.Module):
        del torch.nn.Module.__getstate__
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, lazy.AfterImport)]
