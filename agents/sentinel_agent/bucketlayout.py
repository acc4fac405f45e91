"""Which parameters lie where in DDP's buckets, so that one read of a bucket tells the norm of each gradient in it.

Owns the layouts. DDP's own record of the rebuilt buckets names the parameters; nothing is believed before the values at each
parameter's place were found equal to its gradient's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

TRIES: Final = 12
"""Backwards after which a layout that was not found is given up: DDP rebuilds its buckets in the second."""
_INDICES: Final = "rebuilt_per_bucket_param_indices"


@dataclass(frozen=True, slots=True)
class Layout:
    """A bucket's parameters in order: their names and numbers of elements."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]


class BucketLayouts:
    """Layouts of the buckets of the DDP modules of this process. ``named()`` gives all parameters with their names."""

    def __init__(self, named: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._named = named
        self._modules: list[weakref.ref[DistributedDataParallel]] = []
        self._known: dict[tuple[int, int], Layout] = {}  # by the bucket's address and size
        self._tries = 0
        self._met: list[Tensor] = []

    def add(self, module: DistributedDataParallel) -> None:
        """A model was wrapped. What is known of buckets is forgotten: addresses are used again."""
        self._modules.append(weakref.ref(module))
        self._known.clear()
        self._tries = TRIES

    def of(self, bucket: Tensor) -> Layout | None:
        """The layout of this bucket, if it is known; while some are not, the bucket is remembered until its backward ends."""
        layout = self._known.get((bucket.data_ptr(), bucket.numel()))
        if layout is None and self._tries:
            self._met.append(bucket)
        return layout

    def backward_ended(self) -> None:
        """Gradients are where DDP has put them: learn the layouts of the buckets that this backward reduced."""
        met, self._met = self._met, []
        if not met:
            return
        self._tries -= 1
        names = {id(parameter): name for name, parameter in self._named()}
        for module in (one for ref in self._modules if (one := ref()) is not None):
            expected = list(_buckets(module))
            if [sum(p.numel() for p in bucket) for bucket in expected] == [tensor.numel() for tensor in met]:
                for tensor, parameters in zip(met, expected, strict=True):
                    self._learn(tensor, parameters, names)

    def _learn(self, bucket: Tensor, parameters: list[nn.Parameter], names: dict[int, str]) -> None:
        sizes = tuple(parameter.numel() for parameter in parameters)
        if all(id(parameter) in names for parameter in parameters) and _holds(bucket, parameters, sizes):
            layout = Layout(tuple(names[id(parameter)] for parameter in parameters), sizes)
            self._known[bucket.data_ptr(), bucket.numel()] = layout


def _buckets(module: DistributedDataParallel) -> Iterable[list[nn.Parameter]]:
    """Parameters of each rebuilt bucket, in the order in which they lie there; nothing before they are rebuilt."""
    told = module._get_ddp_logging_data().get(_INDICES, "")  # type: ignore[no-untyped-call]
    parameters = list(_reduced(module))
    for bucket in told.split(",") if told else ():
        indices = [int(index) for index in bucket.split()]
        if all(index < len(parameters) for index in indices):
            yield [parameters[index] for index in indices]


def _reduced(module: DistributedDataParallel) -> Iterable[nn.Parameter]:
    """The parameters that DDP reduces, numbered as its reducer numbers them: each once, in the order of modules."""
    seen: set[int] = set()
    ignored = set(module.parameters_to_ignore)
    for owner, inner in module.module.named_modules():
        for name, parameter in inner.named_parameters(recurse=False):
            if parameter.requires_grad and f"{owner}.{name}" not in ignored and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _holds(bucket: Tensor, parameters: list[nn.Parameter], sizes: tuple[int, ...]) -> bool:
    """Is the first value at each parameter's place that of its gradient?"""
    gradients = [p.grad for p in parameters if p.grad is not None and _is_like(p.grad, bucket)]
    if len(gradients) < len(parameters):
        return False
    firsts = torch.stack([g.detach().as_strided((), (), g.storage_offset()) for g in gradients])
    places = torch.tensor([0, *sizes[:-1]], device=bucket.device).cumsum(0)
    return torch.equal(bucket[places], firsts)


def _is_like(gradient: Tensor, bucket: Tensor) -> bool:
    """A plain gradient of the bucket's kind: no sparse one, no shard."""
    same = gradient.dtype is bucket.dtype and gradient.device == bucket.device
    return same and type(gradient) is Tensor and gradient.layout is torch.strided and gradient.numel() > 0
