"""Were parameters written by anybody but their optimizer? Versions after each step, compared when something is found wrong.

Owns the versions. A checkpoint that is loaded in the middle of a training is told apart so from a step that overflowed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch

MARKED: Final = 256  # parameters of one optimizer whose versions are noted
SAMPLED: Final = 2  # of them, looked at in every round


class Written:
    """Versions of parameters as their optimizers' steps left them."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._habit = False

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is over: what it wrote is its own."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]][:MARKED]
        for parameter in parameters:
            known = self._marks.get(id(parameter))
            ref = known[0] if known is not None and known[0]() is parameter else weakref.ref(parameter)
            version = _version(parameter)
            if version is not None:
                self._marks[id(parameter)] = (ref, version)

    def since_the_step(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Was any of these written since its optimizer's last step, in a training where that is no habit?"""
        return not self._habit and any(self._was_written(parameter) for parameter in parameters)

    def round_closes(self, parameters: Iterable[torch.Tensor]) -> None:
        """A round without a finding ends: a script that writes its parameters in between (EMA, clamping) is known from now on."""
        if not self._habit and self._marks:
            self._habit = any(self._was_written(p) for p, _ in zip(parameters, range(SAMPLED), strict=False))

    def _was_written(self, parameter: torch.Tensor) -> bool:
        known = self._marks.get(id(parameter))
        return known is not None and known[0]() is parameter and _version(parameter) != known[1]


def _version(parameter: Any) -> int | None:
    """The version counter of what the optimizer writes; None where another owner moves the memory about, as FSDP1 does."""
    if type(parameter).__name__ == "FlatParameter":
        return None
    return int(getattr(parameter, "_local_tensor", parameter)._version)
