"""Trainings in which something goes wrong at step 3, one for each way in which frameworks reduce gradients."""

from __future__ import annotations

import atexit
import os
from typing import Any

import lab
import torch
import torch.distributed as dist
from lab import average, ddp, equal_start, loss_of, network, planted, sgd
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_gather

STEPS, FAULT, GUILTY = 6, 3, 1


class Planted(nn.Module):
    """Identity whose gradient gets one element of ``value`` on the guilty ranks while ``armed``."""

    def __init__(self, *guilty: int, value: float = float("nan")) -> None:
        super().__init__()
        self.guilty, self.value, self.armed = guilty or (GUILTY,), value, False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as they are."""
        return planted(rows, self.armed and lab.rank() in self.guilty, self.value)


def _train(model: nn.Module, fault: Planted, optimizer: Any = None, reduce: Any = None, steps: int = STEPS) -> None:
    optimizer = optimizer or sgd(model.parameters(), 0.01)
    for step in range(steps):
        fault.armed = step == FAULT
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if reduce is not None:
            reduce(model)
        optimizer.step()


def ddp_of_four() -> None:
    """DDP, one rank of four."""
    fault = Planted(2)
    _train(ddp(network(fault)), fault)


def ddp_two_of_four() -> None:
    """DDP, two ranks of four."""
    fault = Planted(0, 3)
    _train(ddp(network(fault)), fault)


def fsdp1() -> None:
    """FSDP1's flat parameter."""
    fault = Planted()
    model = FullyShardedDataParallel(network(fault), device_id=torch.device("cpu"))
    _train(model, fault)


def fsdp2_first_micro_batch() -> None:
    """fully_shard with accumulation: the NaN is in a micro-batch whose gradients are not reduced yet."""
    fault = Planted()
    model = network(fault)
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        for micro in range(2):
            fault.armed = (step, micro) == (FAULT, 0)
            model.set_requires_gradient_sync(micro == 1)
            (loss_of(model, 2 * step + micro) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_first_micro_batch() -> None:
    """DDP with no_sync: the NaN is in a micro-batch whose gradients are not reduced yet."""
    fault = Planted()
    model = ddp(network(fault))
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            fault.armed = step == FAULT
            loss_of(model, 2 * step).backward()
        fault.armed = False
        loss_of(model, 2 * step + 1).backward()
        optimizer.step()


def hybrid_sharding() -> None:
    """HSDP on four ranks: shards within pairs, replicas across them."""
    fault = Planted(2)
    model = network(fault)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    _train(model, fault)


def _compressed(fault: Planted) -> None:
    model = ddp(network(fault))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    _train(model, fault)


def compression_overflows() -> None:
    """Gradients of every rank are finite in float32 and beyond float16: the hook's cast makes them infinite."""
    _compressed(Planted(0, 1, value=1e6))


def compression_overflows_on_one_rank() -> None:
    """The same on rank 1 alone."""
    _compressed(Planted(value=1e6))


def compression_of_nan() -> None:
    """The hook compresses what was NaN before."""
    _compressed(Planted())


def low_rank_of_nan() -> None:
    """PowerSGD compresses what was NaN before; it keeps an error that stays NaN afterwards."""
    fault = Planted()
    model = ddp(network(fault))
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _train(model, fault)
    _leave_without_teardown()


def low_rank_of_zeros() -> None:
    """PowerSGD without an epsilon divides by the norm of what is zero: NaN between its two all-reduces, on every rank."""
    model = ddp()
    state = powerSGD_hook.PowerSGDState(
        None, 1, start_powerSGD_iter=2, min_compression_rate=0.1, use_error_feedback=False, warm_start=False
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = sgd(model.parameters(), 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model, step) * float(step != FAULT)).backward()
        optimizer.step()
    _leave_without_teardown()


def _leave_without_teardown() -> None:
    """End the process before torch frees its process group.

    PowerSGD's chained futures can hold the group's last reference on one of its own threads; freed there, it joins itself and the
    process aborts ("Resource deadlock avoided"), in about a quarter of all runs under load, with plain torchrun too.
    """
    dist.barrier()
    atexit._run_exitfuncs()
    os._exit(0)


def _coalesced(model: nn.Module) -> None:
    gradients = [p.grad for p in model.parameters()]
    dist.group.WORLD.allreduce_coalesced(gradients, dist.AllreduceCoalescedOptions()).wait()
    for gradient in gradients:
        gradient.div_(lab.world())


def coalesced() -> None:
    """One coalesced all-reduce of all gradients."""
    fault = Planted()
    _train(equal_start(network(fault)), fault, reduce=_coalesced)


def _flattened(model: nn.Module) -> None:
    gradients = [p.grad for p in model.parameters()]
    flat = average(torch._utils._flatten_dense_tensors(gradients))
    for gradient, mean in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(mean)


def flattened() -> None:
    """One buffer for all gradients."""
    fault = Planted()
    _train(equal_start(network(fault)), fault, reduce=_flattened)


def shard_of_the_sum_overflows() -> None:
    """A half-precision reduce-scatter by hand: finite inputs whose sum overflows in the shard of rank 1 alone."""
    model = equal_start(nn.Linear(lab.WIDTH, lab.CLASSES, bias=False))
    optimizer = sgd(model.parameters(), 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        flat = model.weight.grad.reshape(-1).half()
        if step == FAULT:
            flat[-3:] = 4e4
        shard = torch.empty(flat.numel() // lab.world(), dtype=torch.float16)
        dist.reduce_scatter_tensor(shard, flat)
        whole = torch.empty_like(flat)
        dist.all_gather_into_tensor(whole, shard)
        model.weight.grad.copy_(whole.float().view_as(model.weight) / lab.world())
        optimizer.step()


def skipped_by_the_framework() -> None:
    """A framework agrees on an overflow flag and leaves the optimizer alone, as ZeRO implementations do."""
    fault = Planted()
    model = equal_start(network(fault))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8):
        fault.armed = step == FAULT
        loss_of(model, step).backward()
        _flattened(model)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        flag = torch.tensor([0.0 if torch.isfinite(norm) else 1.0])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not flag.item():
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None


def gathered_embeddings() -> None:
    """A contrastive loss over all ranks' embeddings: one rank's NaN makes every rank's loss NaN at once."""
    model = ddp()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        rows, _ = lab.batch(step)
        if step == FAULT and lab.rank() == GUILTY:
            rows[0, 0] = float("nan")
        everyone = torch.cat(all_gather(model(rows)))
        torch.nn.functional.cross_entropy(everyone @ everyone.T, torch.arange(len(everyone))).backward()
        optimizer.step()


def sharded_rank_leaves_the_step_out() -> None:
    """fully_shard, and each rank looks at its own loss before it steps."""
    fault = Planted()
    model = network(fault)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        fault.armed = step == FAULT
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        if not (fault.armed and lab.rank() == GUILTY):
            optimizer.step()


def _one_by_one(model: nn.Module) -> None:
    for parameter in model.parameters():
        average(parameter.grad)


def _forgetting(reduce: Any) -> None:
    model = equal_start(network())
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        if step != FAULT or lab.rank() != GUILTY:
            optimizer.zero_grad()
            loss_of(model, step).backward()
        reduce(model)
        optimizer.step()


def stale_gradient() -> None:
    """Rank 1 forgets its backward and reduces the gradients of the step before."""
    _forgetting(_one_by_one)


def stale_flat_gradient() -> None:
    """The same with all gradients in one buffer."""
    _forgetting(_flattened)


def contribution_of_zeros() -> None:
    """Rank 1 reduces zeros in place of the gradients that its backward made."""
    model = equal_start(network())
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for parameter in model.parameters():
            wire = torch.zeros_like(parameter.grad) if step == FAULT and lab.rank() == GUILTY else parameter.grad
            dist.all_reduce(wire)
            parameter.grad = wire / lab.world()
        optimizer.step()


def order_differs() -> None:
    """Ranks reduce parameters of one shape in opposite orders: every gradient is averaged with another's."""
    layers = [nn.Linear(lab.WIDTH, lab.WIDTH, bias=False) for _ in range(3)]
    model = equal_start(nn.Sequential(*layers, nn.Linear(lab.WIDTH, lab.CLASSES, bias=False)))
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        weights = [layer.weight for layer in layers]
        if step >= FAULT and lab.rank() == GUILTY:
            weights.reverse()
        for weight in (*weights, model[3].weight):
            average(weight.grad)
        optimizer.step()


def passed_over() -> None:
    """Ranks agree to leave a batch out whose loss is nonfinite on one of them, and go on with the next."""
    model = ddp()
    optimizer = sgd(model.parameters())
    for step in range(8):
        inputs, labels = lab.batch(step)
        if step == FAULT and lab.rank() == GUILTY:
            inputs[5] = float("nan")
        loss = nn.functional.cross_entropy(model(inputs), labels)
        bad = (~torch.isfinite(loss)).float()
        dist.all_reduce(bad)
        if bad:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def rounded_away() -> None:
    """A rate so small that bfloat16 weights stay what they are, step by step, though the gradients are fine."""
    model = ddp(network().to(torch.bfloat16))
    optimizer = sgd(model.parameters(), 1e-7)
    for step in range(8):
        inputs, labels = lab.batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.bfloat16()).float(), labels).backward()
        optimizer.step()


def squares_overflow() -> None:
    """The guilty rank's loss spikes: its gradients are finite, their squares in Adam's state are not, and the weights stay put."""
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        spike = 1e22 if step == FAULT and lab.rank() == GUILTY else 1.0
        (loss_of(model, step) * spike).backward()
        optimizer.step()


def weights_changed() -> None:
    """After step 5 something writes to one weight of rank 1; training goes on with equal gradients."""
    model = ddp()
    optimizer = sgd(model.parameters())
    for step in range(12):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if step == 5 and lab.rank() == GUILTY:
            with torch.no_grad():
                model.module[0].weight[0, 0] += 0.5


if __name__ == "__main__":
    lab.main(globals())
