"""The optimizers' state in a part: tensors by optimizer, parameter and key; everything else as numbers, or named as left out.

Owns that layout. Sharded state is this rank's part of it, as with parameters; nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sentinel.bundle.manifest import OptimizerGroup, OptimizerState
from sentinel_agent.contents import local

Scalar = bool | int | float | str | None


class OptimizerDump:
    """State of ``optimizers``, whose parameters are called as ``names`` (by id) say; ``tensors`` is what goes into the file.

    State of parameters in ``left_to_others`` is left out: their writers' parts have it.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        names: Mapping[int, str],
        left_to_others: frozenset[str] = frozenset(),
    ) -> None:
        self._left_to_others = left_to_others
        self.tensors: list[tuple[str, Tensor]] = []
        self.described: list[OptimizerState] = []
        for index, optimizer in enumerate(optimizers):
            self._take(index, optimizer, names)

    def _take(self, index: int, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        scalars: dict[str, dict[str, Scalar]] = {}
        omitted: list[str] = []
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), "?") if isinstance(parameter, Tensor) else str(parameter)
            for key, value in state.items() if isinstance(state, Mapping) else [("", state)]:
                if isinstance(value, Tensor) and name in self._left_to_others:
                    continue
                if isinstance(value, Tensor):
                    self.tensors.append((f"o{index}.{name}.{key}", local(value).detach()))
                elif isinstance(value, Scalar):
                    scalars.setdefault(name, {})[str(key)] = value
                else:
                    omitted.append(f"{name}.{key}: {type(value).__name__}")
        kind = type(optimizer)
        self.described.append(
            OptimizerState(
                index=index,
                type=f"{kind.__module__}.{kind.__qualname__}",
                groups=tuple(_group(group, names) for group in optimizer.param_groups),
                scalars=scalars,
                omitted=tuple(omitted),
            )
        )


def _group(group: Mapping[str, Any], names: Mapping[int, str]) -> OptimizerGroup:
    options = {key: _option(value) for key, value in group.items() if key != "params"}
    return OptimizerGroup(options=options, parameters=tuple(names.get(id(p), "?") for p in group["params"]))


def _option(value: Any) -> Any:
    """A group's option as JSON has it; a tensor of one element (a capturable learning rate) as its number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_option(one) for one in value]
    return value if isinstance(value, Scalar) else type(value).__name__
