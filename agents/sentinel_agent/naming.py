"""Which parameter is called what: fully qualified names from the modules that are being trained.

Owns the list of watched roots (weakly) and the names read from them. Names are the user's own: what DDP, torch.compile and FSDP1
put around a module is looked through, wherever in the tree it is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module"}


def user_name(name: str) -> str:
    """A dotted name without the components that torch.compile and FSDP1 put into it, and without DDP's at its start."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module inside of wrappers."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif isinstance(module, _optimized()):
            module = module._orig_mod
        elif isinstance(inner := module._modules.get("_fsdp_wrapped_module"), nn.Module):
            module = inner
        else:
            return module


def _optimized() -> tuple[type[Any], ...]:
    """torch.compile's wrapper class, if the compiler was ever imported (importing it here would cost seconds)."""
    frame = sys.modules.get("torch._dynamo.eval_frame")
    return (frame.OptimizedModule,) if frame is not None and hasattr(frame, "OptimizedModule") else ()


def named_modules(root: nn.Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the user's modules below ``root``, each once, wrappers looked through."""
    seen = set() if seen is None else seen
    module = unwrapped(root)
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from named_modules(child, f"{prefix}.{name}" if prefix else name, seen)


class Naming:
    """Names of parameters and buffers of the watched roots, and numbers for parameters that no module owns."""

    def __init__(self) -> None:
        self._roots: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._shards: weakref.WeakKeyDictionary[nn.Module, dict[str, weakref.ref[torch.Tensor]]]
        self._shards = weakref.WeakKeyDictionary()

    @property
    def known(self) -> bool:
        """True while any root or optimizer that was met is alive."""
        return bool(self.alive())

    def alive(self) -> list[weakref.ref[Any]]:
        """Roots and optimizers that were met and are still there, weakly."""
        met: list[weakref.ref[Any]] = [*self._roots, *self._optimizers]
        return [ref for ref in met if ref() is not None]

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

    def optimized(self) -> int:
        """How many parameters the optimizers step, which a script may add to."""
        return sum(len(group["params"]) for optimizer in self.optimizers() for group in optimizer.param_groups)

    def _outermost(self) -> list[nn.Module]:
        """Roots that no other root contains: ``fully_shard`` is called on the blocks first, but users name from the whole."""
        alive = [root for ref in self._roots if (root := ref()) is not None]
        inner = {id(module) for root in alive for module in root.modules() if module is not root}
        return [root for root in alive if id(root) not in inner]

    def module_name(self, wanted: nn.Module) -> str | None:
        """What a module of the roots is called; the class of a root itself, None for one of no root."""
        for root in self._outermost():
            for name, module in named_modules(root):
                if module is wanted:
                    return name or type(module).__name__
        return None

    def modules(self) -> Iterator[nn.Module]:
        """Every module of the roots, outermost first."""
        return (module for root in self._outermost() for module in root.modules())

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, parameter) of every parameter known, each once."""
        seen: set[int] = set()
        for name, parameter in self._of_modules("_parameters"):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter
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
        for name, buffer in self._of_modules("_buffers"):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield name, buffer

    def _of_modules(self, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for root in self._outermost():
            for prefix, module in named_modules(root, seen=seen):
                for name, tensor in getattr(module, kind).items():
                    if tensor is not None:
                        kept = self._sharded_form(module, name, tensor)
                        yield (f"{prefix}.{name}" if prefix else name), kept

    def _sharded_form(self, module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """FSDP2 puts gathered parameters in the places of the shards while it computes: what is trained are the shards."""
        if hasattr(tensor, "_local_tensor"):
            self._shards.setdefault(module, {})[name] = weakref.ref(tensor)
            return tensor
        shards = self._shards.get(module)
        shard = shards[name]() if shards is not None and name in shards else None
        return tensor if shard is None else shard
