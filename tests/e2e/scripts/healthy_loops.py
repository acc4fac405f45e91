"""Healthy trainings with loops that people write: closures, two optimizers, skipped steps, averaging, validation between steps."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys

import lab
import torch
import torch.distributed as dist
from lab import average, batch, ddp, equal_start, loss_of, network, sgd
from torch import nn

STEPS = 6


def accumulation_without_no_sync() -> None:
    """Four micro-batches per step, each of them reduced."""
    model = ddp()
    optimizer = sgd(model.parameters())
    for micro in range(STEPS * 4):
        (loss_of(model, micro) / 4).backward()
        if micro % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def accumulation_with_no_sync() -> None:
    """Four micro-batches per step, the last one reduced, then clipped."""
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    for micro in range(STEPS * 4):
        last = micro % 4 == 3
        with contextlib.nullcontext() if last else model.no_sync():
            (loss_of(model, micro) / 4).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def gan_alternating() -> None:
    """A generator and a discriminator that step in turn, gradients of the other thrown away."""
    maker, judge = (
        ddp(nn.Linear(8, lab.WIDTH)),
        ddp(nn.Sequential(nn.Linear(lab.WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))),
    )
    make_step, judge_step = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    score = nn.functional.binary_cross_entropy_with_logits
    for step in range(STEPS):
        real, _ = batch(step)
        noise = torch.randn(lab.ROWS, 8, generator=torch.Generator().manual_seed(step))
        judge_step.zero_grad()
        both = judge(torch.cat([real, maker(noise).detach()]))
        truth = torch.cat([torch.ones(lab.ROWS, 1), torch.zeros(lab.ROWS, 1)])
        score(both, truth).backward()
        judge_step.step()
        make_step.zero_grad()
        score(judge(maker(noise)), torch.ones(lab.ROWS, 1)).backward()
        make_step.step()


def gan_joint() -> None:
    """Two networks trained by one loss, each with an optimizer of its own."""
    first, second = ddp(nn.Linear(lab.WIDTH, 8)), ddp(nn.Linear(8, lab.CLASSES))
    optimizers = [torch.optim.Adam(first.parameters()), torch.optim.AdamW(second.parameters())]
    for step in range(STEPS):
        inputs, labels = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(second(first(inputs)), labels).backward()
        for optimizer in optimizers:
            optimizer.step()


def lbfgs() -> None:
    """LBFGS evaluates its closure several times per step."""
    model = ddp(nn.Linear(lab.WIDTH, lab.CLASSES))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)


def backward_inside_step() -> None:
    """Zeroing, forward and backward all happen inside ``optimizer.step(closure)``."""
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())

    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            loss = loss_of(model, step)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss

        optimizer.step(closure=closure)


def steps_left_out() -> None:
    """A step is left out on all ranks when the mean gradient norm is high: a finite criterion."""
    model = ddp()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        dist.all_reduce(norm)
        if step % 3 != 1:
            optimizer.step()


def uneven_inputs() -> None:
    """Ranks have different numbers of batches, under DDP's join."""
    model = ddp()
    optimizer = sgd(model.parameters())
    with model.join():
        for step in range(STEPS + 3 * lab.rank()):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()


def moving_average_of_weights() -> None:
    """An EMA copy is updated after every step and validated."""
    model = ddp()
    smooth = copy.deepcopy(model.module)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(smooth.parameters(), model.module.parameters(), strict=True):
                kept.lerp_(new, 0.1)
            loss_of(smooth, 999)


def local_sgd() -> None:
    """Ranks train alone and average their parameters every four rounds."""
    model = equal_start(network())
    optimizer = sgd(model.parameters())
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if step % 4 == 3:
            for parameter in model.parameters():
                average(parameter.data)


def gradients_zeroed_in_place() -> None:
    """zero_grad(set_to_none=False) keeps the gradients' memory."""
    model = ddp(gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        optimizer.step()


def gradients_dropped_by_hand() -> None:
    """``p.grad = None`` in place of zero_grad."""
    model = ddp()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None


def _apply_by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def manual_sgd() -> None:
    """No optimizer object: DDP's gradients are applied by hand."""
    model = ddp()
    for step in range(STEPS):
        loss_of(model, step).backward()
        _apply_by_hand(model)


def manual_everything() -> None:
    """Neither a wrapper nor an optimizer: gradients are averaged and applied by hand."""
    model = equal_start(network())
    for step in range(STEPS):
        loss_of(model, step).backward()
        for parameter in model.parameters():
            average(parameter.grad)
        _apply_by_hand(model)


def validation_between_steps() -> None:
    """Every second step a validation over several batches, its loss averaged over the ranks."""
    model = ddp(network(nn.Dropout(0.1)))
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if step % 2:
            model.eval()
            with torch.no_grad():
                average(torch.stack([loss_of(model.module, 500 + i) for i in range(3)]).mean())
            model.train()


def perplexity_that_overflows() -> None:
    """Infinite beside a finite loss, with a history, and held until the script ends; a validation has gradients enabled, too."""
    global perplexity
    model = ddp()
    optimizer = sgd(model.parameters())
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        perplexity = torch.exp(loss * 100.0)
        loss.backward()
        optimizer.step()
        if step % 2:
            perplexity = torch.exp(loss_of(model, 100 + step) * 100.0)


def metric_that_is_nan() -> None:
    """An accuracy of no samples is 0/0 and is averaged over the ranks, as a scalar and as a table, while training is healthy."""
    model = ddp()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        average(torch.zeros(()) / torch.zeros(()))
        average(torch.full((3,), float("nan")))


def numbers_of_other_types() -> None:
    """Integer, boolean, float64 and one-element reductions beside the gradients, some of them infinite or NaN by design."""
    model = ddp()
    optimizer = sgd(model.parameters())
    best = torch.tensor(float("inf"), dtype=torch.float64)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        dist.all_reduce(torch.tensor([step, lab.rank()]))
        dist.all_reduce(torch.tensor([True, False]), op=dist.ReduceOp.MAX)
        dist.all_reduce(best, op=dist.ReduceOp.MIN)
        dist.all_reduce(torch.tensor(float("-inf")), op=dist.ReduceOp.MAX)
        dist.all_reduce(torch.tensor([float("inf")] * 3, dtype=torch.float64), op=dist.ReduceOp.MIN)
        optimizer.step()


def parameters_frozen() -> None:
    """Half of the network does not train, and a frozen mask holds -inf."""
    model = network()
    model[0].requires_grad_(False)
    model.mask = nn.Parameter(torch.full((4, 4), float("-inf")).triu(), requires_grad=False)
    wrapped = ddp(model)
    optimizer = sgd([p for p in wrapped.parameters() if p.requires_grad])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, step).backward()
        optimizer.step()


def one_loader_after_another() -> None:
    """Two epochs over a DataLoader, a learning-rate schedule, a checkpoint saved and loaded between them."""
    inputs, labels = zip(*(batch(step) for step in range(STEPS)), strict=True)
    dataset = torch.utils.data.TensorDataset(torch.cat(inputs), torch.cat(labels))
    sampler = torch.utils.data.DistributedSampler(dataset, lab.world(), lab.rank())
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for rows, wanted in itertools.islice(loader, 4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows), wanted).backward()
            optimizer.step()
        schedule.step()
        model.module.load_state_dict(copy.deepcopy(model.module.state_dict()))


def ends_with_sys_exit() -> None:
    """``sys.exit(0)`` as the last line of a script, as in ``sys.exit(main())``."""
    model = ddp()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    lab.main(globals())
