"""Trainings that end by themselves, or are ended, in the round in which rank 1 meets NaN: step 3."""

from __future__ import annotations

import os
import signal
import sys
import time

import lab
import torch
from lab import ddp, loss_of, planted, sgd
from torch import nn

STEPS, FAULT, GUILTY = 6, 3, 1
model = optimizer = None


def _ready() -> None:
    global model, optimizer
    model = ddp()
    optimizer = sgd(model.parameters())


def _forward(step: int) -> torch.Tensor:
    loss = loss_of(model, step)
    return loss * float("nan") if step == FAULT and lab.rank() == GUILTY else loss


def _finish_step(loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def sys_exit() -> None:
    """``sys.exit(1)`` on a nonfinite loss, before backward."""
    _ready()
    for step in range(STEPS):
        loss = _forward(step)
        if not torch.isfinite(loss):
            print("loss is not finite, stopping", file=sys.stderr)
            sys.exit(1)
        _finish_step(loss)


def system_exit() -> None:
    """``raise SystemExit`` on a nonfinite loss, before backward."""
    _ready()
    for step in range(STEPS):
        loss = _forward(step)
        if not torch.isfinite(loss):
            raise SystemExit(1)
        _finish_step(loss)


def runtime_error() -> None:
    """An exception on a nonfinite loss, before backward."""
    _ready()
    for step in range(STEPS):
        loss = _forward(step)
        if not torch.isfinite(loss):
            raise RuntimeError(f"loss is {loss.item()}")
        _finish_step(loss)


def loss_refuses() -> None:
    """BCELoss itself raises on probabilities that are NaN; the other rank dies of the reduction that never comes."""
    _ready()
    for step in range(STEPS):
        inputs, labels = lab.batch(step)
        if step == FAULT and lab.rank() == GUILTY:
            inputs[2] = float("nan")
        probabilities = torch.sigmoid(model(inputs)[:, 0])
        _finish_step(nn.functional.binary_cross_entropy(probabilities, (labels > 1).float()))


def break_out() -> None:
    """The loop is left on a nonfinite loss (agreed by all ranks), and the script ends in order."""
    _ready()
    for step in range(STEPS):
        loss = _forward(step)
        if not torch.isfinite(lab.average(loss.detach().clone())):
            break
        _finish_step(loss)


def error_in_clipping() -> None:
    """clip_grad_norm_(error_if_nonfinite=True) raises on both ranks, since the reduction has spread the NaN."""
    _ready()
    for step in range(STEPS):
        loss = _forward(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()


def anomaly_mode() -> None:
    """Torch's anomaly detection raises in the backward that makes NaN of a distance of zero; nothing of it is reduced."""
    _ready()
    torch.autograd.set_detect_anomaly(True)
    for step in range(STEPS):
        inputs, labels = lab.batch(step)
        scores = model(inputs)
        apart = scores - (scores.detach() if step == FAULT and lab.rank() == GUILTY else 1.0)
        _finish_step(nn.functional.cross_entropy(scores, labels) + apart.square().sum().sqrt())


def _killed(sent: signal.Signals, seconds: float) -> None:
    _ready()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = planted(loss_of(model, step), step == FAULT and lab.rank() == GUILTY)
        loss.backward()
        if step == FAULT and lab.rank() == GUILTY:
            time.sleep(seconds)
            os.kill(os.getpid(), sent)
        optimizer.step()


def killed_by_sigterm() -> None:
    """A scheduler's SIGTERM arrives a tenth of a second after the backward, before the step."""
    _killed(signal.SIGTERM, 0.1)


def killed_by_sigkill() -> None:
    """The kernel kills the rank a tenth of a second after its backward."""
    _killed(signal.SIGKILL, 0.1)


def killed_at_once() -> None:
    """SIGTERM arrives in the very moment in which the backward returns."""
    _killed(signal.SIGTERM, 0.0)


if __name__ == "__main__":
    lab.main(globals())
