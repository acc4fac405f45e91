"""The training processes of the matrix: many small trainings one after another in one process group, a fault at the end of each.

Owns the trainings and the log of which rounds were whose. Started by ``matrix.py`` under ``sentinel run``; knows no verdict.

usage: matrix_ranks.py CASES.json FOLDER      (writes FOLDER/rank-N.json)
"""

# No postponed annotations here: torch reads the ones of a communication hook.

import gc
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matrix_cases import Case, Does, Way
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from sentinel_agent import process
from sentinel_agent.agent import Agent
from sentinel_agent.testing.faults import FaultPlan, Where

HEALTHY = 12
"""Rounds before the fault: more than those within which the same verdict on the same ranks counts as the same incident."""
INPUTS, HIDDEN, OUTPUTS, ROWS = 12, 24, 12, 8  # multiples of 2, 3 and 4, so that no shard is padded
BEYOND_CAST = 1e6
BEYOND_SUM = 6e4
"""Below float16's 65504; half of it three times, as FSDP2 sums it, is beyond."""

Reduce = Callable[[nn.Module], None]


def network(dtype: torch.dtype) -> nn.Sequential:
    """Two layers whose gradients mostly have one sign, so that their sum is far from zero."""
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    return model.to(dtype)


class Training:
    """One small training. ``model`` is called, ``reduce`` comes after backward where the way is a loop of the user's."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.number)
        self.dtype = torch.float32 if case.way is Way.FSDP2 else getattr(torch, case.dtype)
        self.inner = network(self.dtype)
        self.model, self.reduce = _wrapped(case, self.inner)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.choice = torch.Generator().manual_seed(case.number * 100 + dist.get_rank())

    def step(self) -> None:
        """One round."""
        inputs = torch.rand(ROWS, INPUTS, generator=self.choice).to(self.dtype) + 0.5
        self.optimizer.zero_grad()
        (self.model(inputs).float() + 1.0).square().mean().backward()
        self.reduce(self.model)
        self.optimizer.step()


def _wrapped(case: Case, model: nn.Module) -> tuple[nn.Module, Reduce]:
    match case.way:
        case Way.FSDP2:
            return _sharded(model, getattr(torch, case.dtype)), _nothing
        case Way.LOOP:
            return model, _one_by_one
        case Way.FLAT:
            return model, _flattened
        case Way.COALESCED:
            return model, _coalesced
    wrapped = DistributedDataParallel(model, bucket_cap_mb=300 * next(model.parameters()).element_size() / 2**20)
    if case.way is Way.FP16_HOOK:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    elif case.way is Way.USER_HOOK:
        wrapped.register_comm_hook(None, sum_then_divide)
    return wrapped, _nothing


def _sharded(model: nn.Module, reduced_in: torch.dtype) -> nn.Module:
    policy = MixedPrecisionPolicy(reduce_dtype=None if reduced_in is torch.float32 else reduced_in)
    fully_shard(model[0], mp_policy=policy)  # type: ignore[index]
    return fully_shard(model, mp_policy=policy)


def sum_then_divide(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A user's hook that sums in the gradients' own dtype."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(dist.get_world_size()))


def _nothing(_model: nn.Module) -> None:
    pass


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _divide(gradients: Iterable[torch.Tensor]) -> None:
    for gradient in gradients:
        gradient.div_(dist.get_world_size())


def _one_by_one(model: nn.Module) -> None:
    for gradient in _gradients(model):
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())


def _flattened(model: nn.Module) -> None:
    gradients = _gradients(model)
    flat = torch._utils._flatten_dense_tensors(gradients)
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for gradient, mean in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(mean)


def _coalesced(model: nn.Module) -> None:
    gradients = _gradients(model)
    dist.group.WORLD.allreduce_coalesced(gradients, dist.AllreduceCoalescedOptions()).wait()
    _divide(gradients)


def plan_of(case: Case, round_: int) -> FaultPlan:
    """The case's fault in round ``round_``."""
    plan = FaultPlan(seed=case.number)
    for rank in [None] if case.everywhere else case.ranks:
        where: Where = {"rank": rank, "round": round_, "phase": case.phase, "collective": case.collective}
        match case.does:
            case Does.NAN:
                plan.nan_at(**where)
            case Does.INF:
                plan.inf_at(**where)
            case Does.CAST_OVERFLOW:
                plan.value_at(BEYOND_CAST, **where)
            case Does.SUM_OVERFLOW:
                plan.value_at(BEYOND_SUM, **where)
            case Does.BIT_FLIP:
                plan.bit_flip_at(**where)
            case Does.SIGN:
                plan.sign_at(**where)
            case Does.SCALE:
                plan.scale_at(3.0, **where)
            case Does.LOST:
                plan.lost_contribution_at(**where)
            case Does.DUPLICATED:
                plan.duplicated_contribution_at(**where)
    return plan


def run_case(case: Case, agent: Agent) -> dict[str, Any]:
    """Healthy rounds, then the fault's; what was done in which rounds."""
    began, first = time.monotonic(), agent.ledger.round.number
    training = Training(case)
    injection = plan_of(case, first + HEALTHY).install(agent)
    injection.watch(training.inner)
    for _ in range(HEALTHY + 1):
        training.step()
    injection.remove()
    missing = [str(fault) for fault in injection.missing()]
    seconds = time.monotonic() - began
    fault, last = first + HEALTHY, agent.ledger.round.number - 1
    return {"case": case.number, "first": first, "fault": fault, "last": last, "missing": missing, "seconds": seconds}


def main() -> None:
    """Run every case of the file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    agent = process.current()
    assert agent is not None, "start me under sentinel run"
    done = []
    for words in json.loads(Path(sys.argv[1]).read_text()):
        case = case_of(words)
        done.append(run_case(case, agent))
        gc.collect()  # a DDP is full of cycles, and the next training must not find the last one's optimizer
    Path(sys.argv[2], f"rank-{dist.get_rank()}.json").write_text(json.dumps(done))
    dist.destroy_process_group()


def case_of(words: list[Any]) -> Case:
    """A case as it came out of JSON."""
    number, world, way, dtype, phase, does, ranks, collective = words
    return Case(number, world, Way(way), dtype, phase, Does(does), tuple(ranks), collective)


if __name__ == "__main__":
    main()
