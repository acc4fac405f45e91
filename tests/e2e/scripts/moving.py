"""Trainings in which rank 1's (or another's) NaN reaches the others by what moves values without reducing them, at step 3."""

from __future__ import annotations

import time
from collections.abc import Callable

import lab
import torch
import torch.distributed as dist
from lab import CLASSES, WIDTH, ddp, sgd
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

STEPS, FAULT, GUILTY = 6, 3, 1
NAN = float("nan")


def experts() -> None:
    """Tokens go to each rank's expert and back; the guilty rank's expert makes NaN of all it gets."""
    model = ddp(nn.Linear(WIDTH, WIDTH))
    expert, head = nn.Linear(WIDTH, WIDTH), ddp(nn.Linear(WIDTH, CLASSES))
    optimizer = sgd([*model.parameters(), *expert.parameters(), *head.parameters()], 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows, labels = lab.batch(step)
        tokens = model(rows)
        worked = expert(all_to_all_single(torch.empty_like(tokens), tokens))
        if step == FAULT and lab.rank() == GUILTY:
            worked = worked * NAN
        back = all_to_all_single(torch.empty_like(worked), worked.contiguous())
        cross_entropy(head(back), labels).backward()
        optimizer.step()


def gathered_into_one_tensor() -> None:
    """Embeddings of all ranks as one tensor, those of the others without gradients."""
    model = ddp(nn.Linear(WIDTH, CLASSES))
    optimizer = sgd(model.parameters(), 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows, labels = lab.batch(step)
        if step == FAULT and lab.rank() == GUILTY:
            rows[2] = NAN
        own = model(rows)
        everyone = torch.empty(lab.world() * len(own), CLASSES)
        dist.all_gather_into_tensor(everyone, own.detach().contiguous())
        (cross_entropy(own, labels) + (own @ everyone.T).square().mean()).backward()
        optimizer.step()


def teacher_handed_round() -> None:
    """Rank 0 keeps a teacher and broadcasts it before each step; once it holds NaN."""
    student, teacher = ddp(nn.Linear(WIDTH, CLASSES)), nn.Linear(WIDTH, CLASSES).requires_grad_(False)
    optimizer = sgd(student.parameters(), 0.01)
    for step in range(STEPS):
        if step == FAULT and lab.rank() == 0:
            teacher.weight[0, 0] = NAN
        for tensor in teacher.parameters():
            dist.broadcast(tensor.data, 0)
        optimizer.zero_grad()
        rows, _ = lab.batch(step)
        mse_loss(student(rows), teacher(rows)).backward()
        optimizer.step()


def _staged(spoil: Callable[[int, str, torch.Tensor], torch.Tensor], wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Two stages, activations sent on and their gradients sent back; ``spoil(step, place, tensor)`` may break what is there."""
    first = lab.rank() % 2 == 0
    peer = lab.rank() + (1 if first else -1)
    stage = wrap(nn.Linear(WIDTH, WIDTH if first else CLASSES))
    optimizer = sgd(stage.parameters(), 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows, labels = lab.batch(step)
        if first:
            sent = spoil(step, "first", stage(rows))
            dist.send(sent.detach(), peer)
            gradient = torch.empty_like(sent)
            dist.recv(gradient, peer)
            sent.backward(gradient)
        else:
            got = torch.empty(len(rows), WIDTH)
            dist.recv(got, peer)
            got.requires_grad_()
            cross_entropy(spoil(step, "last", stage(got)), labels).backward()
            dist.send(got.grad, peer)
        optimizer.step()


def _at(place: str, *ranks: int) -> Callable[[int, str, torch.Tensor], torch.Tensor]:
    def spoil(step: int, here: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * NAN if (step, here) == (FAULT, place) and lab.rank() in ranks else tensor

    return spoil


def pipeline_first_stage() -> None:
    """The first stage's activations become NaN: the last stage computes the loss of them."""
    _staged(_at("first", 0), lambda stage: stage)


def pipeline_last_stage() -> None:
    """The last stage's output becomes NaN: the first stage gets NaN gradients for what was finite."""
    _staged(_at("last", 1), lambda stage: stage)


def _replicated(stage: nn.Module) -> nn.Module:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return DistributedDataParallel(stage, process_group=groups[lab.rank() % 2])


def replicated_pipeline_first_stage() -> None:
    """Two replicas of a pipeline, each stage's gradients reduced over both; rank 2 is one's first stage."""
    _staged(_at("first", 2), _replicated)


def replicated_pipeline_last_stage() -> None:
    """The same, and rank 3 is one's last stage."""
    _staged(_at("last", 3), _replicated)


def sharded_optimizer() -> None:
    """Every rank steps some of the parameters and broadcasts them; the guilty rank's moments become NaN."""
    model = ddp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows, labels = lab.batch(step)
        cross_entropy(model(rows), labels).backward()
        if step == FAULT and lab.rank() == GUILTY:
            next(iter(optimizer.optim.state.values()))["exp_avg_sq"].view(-1)[0] = NAN
        optimizer.step()


def buffers_handed_round() -> None:
    """DDP broadcasts rank 0's running statistics, into which something has written NaN."""
    norm = nn.BatchNorm1d(WIDTH)
    model = ddp(nn.Sequential(norm, nn.Linear(WIDTH, CLASSES)))
    optimizer = sgd(model.parameters(), 0.01)
    for step in range(STEPS):
        if step == FAULT and lab.rank() == 0:
            norm.running_var[3] = NAN
        optimizer.zero_grad()
        rows, labels = lab.batch(step)
        cross_entropy(model(rows), labels).backward()
        optimizer.step()


def divided_by_zero_tokens() -> None:
    """A loop divides what it has reduced by the number of tokens of all ranks, which is zero once."""
    model = lab.equal_start(nn.Linear(WIDTH, CLASSES))
    optimizer = sgd(model.parameters(), 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows, labels = lab.batch(step)
        mask = torch.full((len(rows),), float(step != FAULT))
        (cross_entropy(model(rows), labels, reduction="none") * mask).sum().backward()
        tokens = mask.sum()
        dist.all_reduce(tokens)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= tokens
        optimizer.step()


def never_waited_for() -> None:
    """The guilty rank once steps without waiting, while the other comes late: it has heard of the step, and needs a second more."""
    model = lab.equal_start(nn.Linear(WIDTH, CLASSES))
    optimizer = sgd(model.parameters(), 0.01)
    steps = dist.distributed_c10d._get_default_store()
    for step in range(STEPS):
        optimizer.zero_grad()
        lab.loss_of(model, step).backward()
        guilty = step == FAULT and lab.rank() == GUILTY
        if step == FAULT and not guilty:
            steps.wait(["stepping"])
            time.sleep(1.0)
        given = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
        if guilty:
            steps.set("stepping", "now")
        for work in () if guilty else given:
            work.wait()
        optimizer.step()


def unfrozen() -> None:
    """A layer that DDP was told not to train is trained from step 3 on: nobody reduces its gradients."""
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    model = ddp(nn.Sequential(frozen, nn.ReLU(), nn.Linear(WIDTH, CLASSES)))
    optimizer = sgd([*model.parameters()], 0.01)
    for step in range(STEPS):
        frozen.requires_grad_(step >= FAULT)
        optimizer.zero_grad()
        rows, labels = lab.batch(step)
        cross_entropy(model(rows), labels).backward()
        optimizer.step()


def checkpoint_of_rank_0() -> None:
    """Rank 0 alone loads a checkpoint, which is broken, before DDP's constructor hands its weights to all."""
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    if lab.rank() == 0:
        inner.load_state_dict({name: torch.full_like(part, NAN) for name, part in inner.state_dict().items()})
    model = ddp(inner)
    optimizer = sgd([*model.parameters()], 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows, labels = lab.batch(step)
        cross_entropy(model(rows), labels).backward()
        optimizer.step()


def layer_added() -> None:
    """A layer that is put into the model once DDP has wrapped it, and into the optimizer, is trained on each rank alone."""
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    model = ddp(inner)
    optimizer = sgd([*model.parameters()], 0.01)
    for step in range(STEPS):
        if step == FAULT:
            inner.append(nn.Linear(CLASSES, CLASSES))
            optimizer.add_param_group({"params": inner[-1].parameters()})
        optimizer.zero_grad()
        rows, labels = lab.batch(step)
        cross_entropy(model(rows), labels).backward()
        optimizer.step()


def alone() -> None:
    """Every rank trains by itself, and nobody reduces anything; the guilty rank's gradients become NaN, its loss does not."""
    model = nn.Linear(WIDTH, CLASSES)
    optimizer = sgd(model.parameters(), 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows, labels = lab.batch(step)
        output = lab.planted(model(rows), step == FAULT and lab.rank() == GUILTY, NAN)
        cross_entropy(output, labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    lab.main(globals())
