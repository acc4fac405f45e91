"""Tap on ``torch.autograd.backward``: the loss it is called on, and where a backward begins and ends.

Owns the patch. ``Tensor.backward`` and pipelines call this very function, looked up at call time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from sentinel_agent.errors import Health
from sentinel_agent.patching import wrap
from sentinel_agent.roles import in_backward

_ANOMALY = re.compile(r"Function '(\w+)' returned nan values")
"""What torch.autograd.set_detect_anomaly makes of an operator whose backward gives NaN (torch 2.9 to 2.13)."""


def install(
    on_loss: Callable[[float], None],
    begins: Callable[[], None],
    ended: Callable[[], None],
    unscaled: Callable[[torch.Tensor], torch.Tensor],
    health: Health,
    agree: Callable[[], None] | None = None,
    on_anomaly: Callable[[str], None] = lambda _operator: None,
) -> None:
    """Call ``begins()``, ``on_loss(value)`` for a one-element floating root, run the backward, then ``agree()`` and ``ended()``.

    ``on_anomaly(operator)`` is called where torch's anomaly mode ends a backward, which nobody's gradients leave then.
    ``agree``, where there is one, issues collectives, and so is called even if the agent has switched itself off: the other
    ranks are in them.
    """
    before = health.guarded("loss", lambda tensors: _before(tensors, on_loss, begins, unscaled))
    after = health.guarded("backward_end", ended)
    refused = health.guarded("anomaly", lambda error: _refused(error, on_anomaly))
    agreed = None if agree is None else health.guarded("agree", agree, even_off=True)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or in_backward():
                return original(tensors, *args, **kwargs)  # a reentrant checkpoint calls this inside of a backward
            before(tensors)
            try:
                result = original(tensors, *args, **kwargs)
            except RuntimeError as error:
                refused(error)
                raise
            if agreed is not None:
                agreed()
            after()
            return result

        return backward

    wrap(torch.autograd, "backward", make)


def _refused(error: RuntimeError, on_anomaly: Callable[[str], None]) -> None:
    found = _ANOMALY.search(str(error))
    if found is not None:
        on_anomaly(found[1])


def _before(
    tensors: Any,
    on_loss: Callable[[float], None],
    begins: Callable[[], None],
    unscaled: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    begins()
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if len(roots) != 1 or not isinstance(roots[0], torch.Tensor) or roots[0].numel() != 1:
        return
    loss = unscaled(roots[0]).detach()
    loss = getattr(loss, "_local_tensor", loss)
    if loss.is_floating_point() and loss.device.type != "meta":
        on_loss(float(loss))
