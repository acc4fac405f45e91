"""Puts recorded weights into the script's modules.

Owns the matching of names, which is the recording's: the same modules met in the same order have the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sentinel_agent.contents import local
from sentinel_agent.naming import Naming
from sentinel_agent.tensorfile import Names


def named(naming: Naming) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under the names that a bundle gives them."""
    names = Names()
    for name, tensor in [*naming.parameters(), *naming.buffers()]:
        yield names.take(name), tensor


@torch.no_grad()
def restore(naming: Naming, recorded: Mapping[str, Tensor]) -> list[str]:
    """Copy what was recorded; returns the names of tensors that have no counterpart of their shape in the recording."""
    missing = []
    for name, tensor in named(naming):
        target, source = local(tensor).detach(), recorded.get(name)
        if source is None or source.shape != target.shape:
            missing.append(name)
        else:
            target.copy_(source)
    return missing


def reshard(naming: Naming) -> None:
    """Free the full parameters that FSDP2 still holds from a forward, so that its shards are what a restore writes to."""
    for module in naming.modules():
        again = getattr(module, "reshard", None)
        if callable(again) and "FSDP" in type(module).__name__:
            again()
