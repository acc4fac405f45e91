"""Trainings whose ranks go on alone for long, and meet again: nothing is reduced but weights, or what they have moved by."""

from __future__ import annotations

import copy

import lab
import torch
import torch.distributed as dist
from lab import CLASSES, WIDTH, average, equal_start, loss_of, sgd
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

STEPS, ALONE = 40, 12
"""More than the eight rounds after which replicas that ought to be equal are told to have parted."""


def _large() -> nn.Module:
    """So large that its weights are not compared in every round."""
    return equal_start(nn.Sequential(nn.Linear(WIDTH, 400), nn.ReLU(), nn.Linear(400, 400), nn.Linear(400, CLASSES)))


def local_sgd_of_one_vector() -> None:
    """All parameters are averaged as one vector."""
    model = _large()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if step % ALONE == ALONE - 1:
            together = average(parameters_to_vector(model.parameters()).detach())
            vector_to_parameters(together, model.parameters())


def local_sgd_that_gathers() -> None:
    """Each parameter is gathered from all ranks, who average by themselves."""
    model = _large()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if step % ALONE == ALONE - 1:
            for parameter in model.parameters():
                everyone = [torch.empty_like(parameter) for _ in range(lab.world())]
                dist.all_gather(everyone, parameter.detach())
                with torch.no_grad():
                    parameter.copy_(torch.stack(everyone).mean(0))


def outer_steps() -> None:
    """DiLoCo: an outer optimizer steps by how far the ranks have moved, and all go on from there."""
    model = _large()
    outer = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer_optimizer = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if step % ALONE == ALONE - 1:
            for kept, moved in zip(outer.parameters(), model.parameters(), strict=True):
                kept.grad = average(kept.data - moved.data)
            outer_optimizer.step()
            model.load_state_dict(outer.state_dict())


if __name__ == "__main__":
    lab.main(globals())
