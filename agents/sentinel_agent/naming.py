"""Which parameter is called what: fully qualified names from the modules that are being trained.

Owns the list of watched roots (weakly) and the names read from them. Names are the user's own: wrappers' prefixes are taken off.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


def user_name(name: str) -> str:
    """``name`` without what DDP, torch.compile and FSDP1 put before it."""
    stripped = True
    while stripped:
        stripped = False
        for prefix in WRAPPER_PREFIXES:
            if name.startswith(prefix):
                name, stripped = name.removeprefix(prefix), True
    return name.replace("._orig_mod", "").replace("._fsdp_wrapped_module", "")


class Naming:
    """Names of parameters and buffers of the watched roots, and numbers for parameters that no module owns."""

    def __init__(self) -> None:
        self._roots: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    def add_root(self, module: nn.Module) -> bool:
        """Remember a root module; False if it was known."""
        if any(ref() is module for ref in self._roots):
            return False
        self._roots.append(weakref.ref(module))
        return True

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Remember an optimizer, whose parameters count even if no module owns them; False if it was known."""
        if any(ref() is optimizer for ref in self._optimizers):
            return False
        self._optimizers.append(weakref.ref(optimizer))
        return True

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers still alive, in the order they were met."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def _outermost(self) -> list[nn.Module]:
        """Roots that no other root contains: ``fully_shard`` is called on the blocks first, but users name from the whole."""
        alive = [root for ref in self._roots if (root := ref()) is not None]
        inner = {id(module) for root in alive for module in root.modules() if module is not root}
        return [root for root in alive if id(root) not in inner]

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, parameter) of every parameter known, each once."""
        seen: set[int] = set()
        for root in self._outermost():
            for name, parameter in root.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield user_name(name), parameter
        number = 0
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield f"param_{number}", parameter
                    number += 1

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, buffer) of every buffer of the roots, each once."""
        seen: set[int] = set()
        for root in self._outermost():
            for name, buffer in root.named_buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield user_name(name), buffer
