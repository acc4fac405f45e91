"""One fault as plain values: what is done to which tensor, on which rank, in which round.

Owns the vocabulary and the arithmetic of the damage. Where a fault is put in is ``injection.py``'s, how it is written down in a
test ``faults.py``'s.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import StrEnum, auto

import torch

from sentinel.wire.messages import Phase

ALL_RANKS = None
"""Stands for every rank where a fault names its rank."""

MANTISSA_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
"""Flipping one of these bits leaves a finite number finite."""

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class What(StrEnum):
    """What is done to a tensor."""

    VALUE = auto()  # one element becomes ``Fault.amount``: nan, inf, or a number too large for a narrower dtype
    BIT_FLIP = auto()  # one bit of one element, finite before and after
    SIGN = auto()  # all elements change their sign
    SCALE = auto()  # all elements are multiplied by ``Fault.amount``
    SHIFT = auto()  # one element grows by ``Fault.amount``
    LOST = auto()  # the contribution counts as zeros
    DUPLICATED = auto()  # the contribution counts twice
    STALE = auto()  # the contribution of the round before is sent again


IN_FLIGHT = frozenset({What.LOST, What.DUPLICATED, What.STALE})
"""Faults of the way: the collective is given something else than what this rank handed over."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong once.

    ``round`` is the agent's count. ``phase``: ``raw`` changes autograd's gradient of ``parameter``, ``wire`` what a collective is
    given (faults of the way: after the agent looked), ``reduced`` what it returned, ``params`` a weight before the round's forward.
    ``collective`` numbers the round's reductions of floating tensors with several elements.
    """

    what: What
    rank: int | None
    round: int
    phase: Phase
    parameter: str | None = None
    collective: int = 0
    amount: float = math.nan

    def concerns(self, rank: int) -> bool:
        """Does it happen on ``rank``?"""
        return self.rank is ALL_RANKS or self.rank == rank


def damage(fault: Fault, tensor: torch.Tensor, choice: random.Random, before: torch.Tensor | None = None) -> None:
    """Do to ``tensor``, in place, what the fault says. ``before`` is the round before's, for STALE.

    ``choice`` picks the element and the bit; two ranks with equal choices change the same one.
    """
    with torch.no_grad():
        match fault.what:
            case What.VALUE:
                _element(tensor, choice).fill_(fault.amount)
            case What.SHIFT:
                _element(tensor, choice).add_(fault.amount)
            case What.BIT_FLIP:
                _flip(_element(tensor, choice), choice)
            case What.SIGN:
                tensor.neg_()
            case What.SCALE:
                tensor.mul_(fault.amount)
            case What.LOST:
                tensor.zero_()
            case What.DUPLICATED:
                tensor.mul_(2)
            case What.STALE:
                assert before is not None, "nothing was kept of the round before"
                tensor.copy_(before)


def _element(tensor: torch.Tensor, choice: random.Random) -> torch.Tensor:
    """A view of one element, whatever the strides."""
    view = tensor.detach()
    for size in tensor.shape:
        view = view[choice.randrange(size)]
    return view


def _flip(element: torch.Tensor, choice: random.Random) -> None:
    word = element.view(_WORDS[element.element_size()])
    word ^= 1 << choice.randrange(MANTISSA_BITS[element.dtype])
