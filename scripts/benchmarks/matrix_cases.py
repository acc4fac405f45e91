"""Random faults with the verdict that each deserves: what may happen where, drawn from a seed, and what can be known of it.

Owns the table of what is right. It is derived from what any observer could tell, not from what Sentinel says: running is
``matrix_ranks.py``'s, judging ``matrix.py``'s.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import count, product
from typing import NamedTuple

QUIET_SHARE = 0.1
"""Part of the draws of a cell given to faults that nobody can tell from another batch: they must stay without an incident."""
EVERYWHERE = 0.3
"""Weight of a fault of all ranks at once against the same on one rank."""


class Way(StrEnum):
    """How a training reduces its gradients."""

    DDP = "ddp"
    FP16_HOOK = "ddp fp16 hook"  # torch's fp16_compress_hook: casts, divides, sums
    USER_HOOK = "ddp user hook"  # sums in the gradients' own dtype, then divides
    FSDP2 = "fsdp2"  # the dtype is the one of the reduction, parameters are float32
    LOOP = "loop"  # all_reduce(p.grad), one by one
    FLAT = "flat buffer"
    COALESCED = "coalesced"


class Does(StrEnum):
    """What goes wrong."""

    NAN = "nan"
    INF = "inf"
    BIT_FLIP = "bit flip"
    SIGN = "sign"
    SCALE = "scale"
    LOST = "lost"
    DUPLICATED = "duplicated"
    CAST_OVERFLOW = "cast overflow"  # finite in the gradient's dtype, not in the wire's
    SUM_OVERFLOW = "sum overflow"  # finite on every rank, not in the sum


PHASES = ("raw", "wire", "reduced")
DTYPES = ("float32", "bfloat16", "float16")
COLLECTIVES = {Way.DDP: 2, Way.FP16_HOOK: 2, Way.USER_HOOK: 2, Way.FSDP2: 2, Way.LOOP: 4, Way.FLAT: 1, Way.COALESCED: 1}
"""Gradient collectives of a round that a fault may choose among, as ``matrix_ranks.py`` builds the trainings."""
LEFT_OUT = (
    "a contribution lost, doubled or changed on all ranks alike, in bfloat16: rounding explains as much",
    "the same in communication hooks and asynchronous calls: user code may write to the result as soon as it is there, so that "
    "nobody takes its sum",
    "finite damage to a shard: its owner has nobody to compare with",
)
"""What cannot be told, and so is not drawn."""
NONFINITE = (Does.NAN, Does.INF)
FINITE = (Does.BIT_FLIP, Does.SIGN, Does.SCALE)
ON_THE_WAY = (Does.LOST, Does.DUPLICATED)


class Case(NamedTuple):
    """One fault in one training. ``ranks`` are those where it happens; ``world`` is how many there are."""

    number: int
    world: int
    way: Way
    dtype: str
    phase: str
    does: Does
    ranks: tuple[int, ...]
    collective: int

    def __str__(self) -> str:
        """All of it in one line."""
        where = f"#{self.collective} " if self.phase != "raw" else ""
        return f"{self.number}: {self.way} {self.dtype} world {self.world}: {self.does} {self.phase} {where}on {list(self.ranks)}"

    @property
    def everywhere(self) -> bool:
        """Does it happen on every rank?"""
        return len(self.ranks) == self.world


class Right(NamedTuple):
    """The verdict that can be known. ``kind`` none: nothing may be said."""

    kind: str
    stage: str
    ranks: tuple[int, ...]


NOTHING = Right("none", "none", ())


def right(case: Case) -> Right:
    """What can be known of a possible case, from first principles."""
    if case.does in NONFINITE:
        return _right_of_nonfinite(case)
    if case.does is Does.CAST_OVERFLOW:
        return Right("nonfinite_gradient", "wire_cast", case.ranks)
    if case.does is Does.SUM_OVERFLOW:  # every rank gave finite values: it is nobody's
        return Right("nonfinite_gradient", "post_reduce", ())
    if case.does in ON_THE_WAY:  # all ranks got the same wrong sum: no rank is seen to differ
        return Right("bad_reduction", "post_reduce", ())
    if case.phase != "reduced":  # finite, and what one rank alone knows: another batch would look the same
        return NOTHING
    if case.everywhere:  # equal on all ranks, but not the sum of what was given
        return Right("bad_reduction", "post_reduce", ())
    return Right("bad_reduction", "post_reduce", (0, 1) if case.world == 2 else case.ranks)  # two have no majority


def _right_of_nonfinite(case: Case) -> Right:
    if case.phase == "raw" or (case.phase == "wire" and wire_is_gradient(case)):
        return Right("nonfinite_gradient", "pre_reduce", case.ranks)
    if case.phase == "wire":
        return Right("nonfinite_gradient", "wire_cast", case.ranks)
    # Finite on every wire: the ranks that got something else are named, unless all did, or a shard has no other copy.
    told = () if case.everywhere or case.way is Way.FSDP2 else case.ranks
    return Right("bad_reduction", "post_reduce", told)


def wire_is_gradient(case: Case) -> bool:
    """Is what the collective is given the gradient itself, so that damage to the one is damage to the other?"""
    return case.way in (Way.LOOP, Way.COALESCED) or (case.way is Way.FSDP2 and not casts(case))


def casts(case: Case) -> bool:
    """Are gradients cast on their way to the wire?"""
    return gradient_dtype(case) != wire_dtype(case)


def gradient_dtype(case: Case) -> str:
    """Dtype that autograd's gradients have."""
    return "float32" if case.way is Way.FSDP2 else case.dtype


def wire_dtype(case: Case) -> str:
    """Dtype that the collective is given."""
    return "float16" if case.way is Way.FP16_HOOK else case.dtype


def possible(case: Case) -> bool:
    """Can this happen, and could any observer know the answer?"""
    if case.way is Way.FP16_HOOK and case.dtype == "float16":
        return False  # nothing is compressed
    if case.does in NONFINITE:
        return True
    if case.does is Does.CAST_OVERFLOW:
        return case.phase == "raw" and casts(case) and wire_dtype(case) == "float16"
    if case.does is Does.SUM_OVERFLOW:
        return case.phase == "raw" and case.everywhere and _sums_before_dividing(case)
    if case.does in ON_THE_WAY:
        return case.phase == "wire" and len(case.ranks) == 1 and _has_checked_sums(case)
    if case.phase != "reduced":
        return len(case.ranks) == 1
    if case.way is Way.FSDP2:
        return False  # a shard's owner has nobody to compare with
    if case.does is Does.BIT_FLIP and (gradient_dtype(case), wire_dtype(case)) == ("bfloat16", "float16"):
        return False  # the bit may be rounded away on the way back to the gradient
    if case.does is Does.BIT_FLIP and case.way is Way.USER_HOOK and case.world.bit_count() > 1:
        return False  # so it may by a division that is not exact: two neighbours have one third
    return len(case.ranks) == 1 or (case.everywhere and case.does is not Does.BIT_FLIP and _has_checked_sums(case))


def _sums_before_dividing(case: Case) -> bool:
    if wire_dtype(case) != "float16" or case.way in (Way.DDP, Way.FP16_HOOK):
        return False  # these divide by the world first
    return case.way is not Way.FSDP2 or case.world > 2  # of two ranks FSDP2 divides by two first


def _has_checked_sums(case: Case) -> bool:
    """Can somebody compare the sum of what was given with the sum of what came back?"""
    return case.way in (Way.DDP, Way.LOOP, Way.FLAT) and wire_dtype(case) != "bfloat16"


def draw(seed: int, cases: int, worlds: Sequence[int], only: str = "") -> list[Case]:
    """So many possible cases, each way of reducing and each phase in turn; ``only`` keeps those whose text contains it.

    Raises ValueError if nothing possible is left.
    """
    choice = random.Random(seed)
    cells = [cell for cell in product(Way, PHASES) if _some(*cell, worlds, only)]
    if not cells:
        raise ValueError(f"no case in worlds {list(worlds)} contains {only!r}")
    found: list[Case] = []
    for attempt in count():
        if len(found) == cases:
            break
        found.append(_draw_one(choice, len(found), *cells[attempt % len(cells)], worlds, only))
    return found


def _some(way: Way, phase: str, worlds: Sequence[int], only: str) -> bool:
    return any(only in str(case) for case in _all(way, phase, worlds))


def _all(way: Way, phase: str, worlds: Sequence[int]) -> Iterator[Case]:
    for world, dtype, does in product(worlds, DTYPES, Does):
        for ranks in ((world - 1,), tuple(range(world))):
            case = Case(0, world, way, dtype, phase, does, ranks, 0)
            if possible(case):
                yield case


def _draw_one(choice: random.Random, number: int, way: Way, phase: str, worlds: Sequence[int], only: str) -> Case:
    choices = [case for case in _all(way, phase, worlds) if only in str(case)]
    quiet = [case for case in choices if right(case) == NOTHING]
    told = [case for case in choices if right(case) != NOTHING]
    choices = quiet if quiet and (not told or choice.random() < QUIET_SHARE) else told
    does = choice.choice(sorted({case.does for case in choices}))
    choices = [case for case in choices if case.does is does]
    like = choice.choices(choices, [EVERYWHERE if case.everywhere else 1.0 for case in choices])[0]
    ranks = like.ranks if like.everywhere else _some_ranks(choice, like)
    return like._replace(number=number, ranks=ranks, collective=choice.randrange(COLLECTIVES[way]))


def _some_ranks(choice: random.Random, like: Case) -> tuple[int, ...]:
    """One rank mostly; of nonfinite values sometimes several, but not all."""
    several = like.does in (*NONFINITE, Does.CAST_OVERFLOW) and like.world > 2 and choice.random() < 0.3
    return tuple(sorted(choice.sample(range(like.world), 2 if several else 1)))
