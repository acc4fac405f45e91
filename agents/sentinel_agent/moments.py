"""Second moments of optimizers: finite gradients whose square overflows leave inf there, and those weights never move again.

Owns when that is looked at, which is only after a step for which this rank gave gradients that are large enough: who gave small
ones is not where the fault came from. What it means is ``habits.py``'s to say.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch

from sentinel.wire.messages import SECOND_MOMENT, Check, Phase
from sentinel_agent.check import EMPTY, check_one, local_part, merged
from sentinel_agent.ledger import Ledger
from sentinel_agent.naming import Naming
from sentinel_agent.rounds import Round
from sentinel_agent.scan import MAX_NAMES

KEYS: Final = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_avg_sq_row", "exp_avg_sq_col")
"""What torch's Adam, AdamW, NAdam, RAdam, RMSprop, Adadelta, Adagrad and Adafactor call sums or means of squared gradients."""
SQUARE_OVERFLOWS: Final = {
    torch.float16: 2.0**8,
    torch.bfloat16: 2.0**64,
    torch.float32: 2.0**64,
    torch.float64: 2.0**512,
}
"""Smallest power of two whose square is beyond each dtype's range (IEEE 754; bfloat16 has float32's exponents)."""
MAX_LOOKS: Final = 64
"""Looks of one run: a loss scale can keep gradients that large, and each look reads the optimizer's state."""


class Moments:
    """Looks at an optimizer's second moments on behalf of a ledger."""

    def __init__(self, naming: Naming, ledger: Ledger) -> None:
        self._naming = naming
        self._ledger = ledger
        self._largest = 0.0
        self._looks = 0
        self._told = False

    def stepping(self, open_round: Round) -> None:
        """An optimizer is about to step with this round's gradients. Nonfinite ones are another fault, which is told as such."""
        nonfinite = open_round.gradient_nonfinite or open_round.loss_nonfinite or open_round.spoilt
        self._largest = 0.0 if nonfinite else open_round.gradient_absmax or 0.0

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """It has: tell the first time that a square has overflowed."""
        largest, self._largest = self._largest, 0.0
        if self._told or self._looks >= MAX_LOOKS or largest < _least(_parameters(optimizer)):
            return
        self._looks += 1
        overflowed = {id(parameter): found for parameter, found in _overflowed(optimizer)}
        if overflowed:
            self._told = True
            self._tell(overflowed)

    def _tell(self, overflowed: dict[int, Check]) -> None:
        names = tuple(name for name, parameter in self._naming.parameters() if id(parameter) in overflowed)
        found = functools.reduce(merged, overflowed.values())
        step = max(self._ledger.clock.step - 1, 0)  # the round was closed as the step began
        self._ledger.latch(
            Phase.CLIP, found, parameters=names[:MAX_NAMES], total=len(overflowed), note=SECOND_MOMENT, step=step
        )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _least(parameters: Iterable[torch.Tensor]) -> float:
    return min((SQUARE_OVERFLOWS.get(one.dtype, 0.0) for one in parameters), default=float("inf"))


def _overflowed(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, Check]]:
    for parameter, state in optimizer.state.items():
        moments = [state.get(key) for key in KEYS] if isinstance(state, Mapping) else []
        parts = [part for one in moments if isinstance(one, torch.Tensor) and (part := local_part(one)) is not None]
        found = next((found for part in parts if (found := check_one(part)).nonfinite), EMPTY)
        if found.inf and not found.nan:
            yield parameter, found
