"""Where nonfinite values were born, and where they only arrived.

Owns the one principle of attribution: between ranks, NaN travels only through collectives. A rank whose first nonfinite value came
*out of* a collective is a receiver; a rank that put one *into* a collective, or had one before any, is an origin.
"""

from __future__ import annotations

from collections.abc import Iterable

from sentinel.incidents.window import RoundWindow, role_of
from sentinel.wire.messages import HANDED, LATE, Evidence, Phase, Role

OWN_PHASES = frozenset({Phase.LOSS, Phase.RAW, Phase.INIT, Phase.PARAMS, Phase.BUFFERS})

FINITE_MAX = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
}
"""Largest finite value of each dtype that travels on the wire (IEEE 754 binary16/32/64; bfloat16 has 8 bits of fraction)."""


def raw_is_nonfinite(evidence: Evidence) -> bool:
    """True if this evidence shows autograd's own gradient to be nonfinite on its rank.

    A gradient's collective whose gradients nobody could look at counts too, unless a cast can have done it: on a wire as wide as
    the gradients, what was given is what autograd made.
    """
    if evidence.phase is Phase.RAW:
        return True
    seen = evidence.collective
    if evidence.phase is not Phase.WIRE or seen is None:
        return False
    if seen.raw is None:
        return seen.role is Role.GRADIENT and not seen.narrowed
    return seen.raw.nonfinite


def received_through_activation(window: RoundWindow, rank: int) -> bool:
    """True if the rank's very first nonfinite value came out of an activation collective that it had fed finite values."""
    for evidence in window.of_rank(rank):
        if role_of(evidence) is Role.ACTIVATION and evidence.phase is Phase.REDUCED:
            return True
        if evidence.phase in OWN_PHASES or evidence.phase is Phase.WIRE:
            return False
    return False


def received_from_another(window: RoundWindow, rank: int) -> bool:
    """True if another rank gave nonfinite values to an activation's or a number's collective of the forward, to which this rank
    gave finite ones, and this rank's loss was nonfinite in the end.

    A sum and a gathering bring one rank's NaN to all. What is given once backward has begun (a metric) explains no gradient.
    """
    if not any(e.phase is Phase.LOSS for e in window.of_rank(rank)):
        return False
    lost = {e.rank for e in window.of_phase(Phase.LOSS)}  # a NaN metric beside a finite loss poisoned nobody's forward
    given = [e for e in window.of_phase(Phase.WIRE) if role_of(e) in (Role.ACTIVATION, Role.SCALAR) and e.rank in lost]
    own = [e for e in given if e.rank == rank]
    # A pipeline's first stage has no loss of its own.
    given += [e for e in window.of_phase(Phase.WIRE) if _is_sent(e) and e.rank not in lost]
    return any(
        _reaches(e, rank) and _precedes_gradients(window, e) and not any(_is_same(e, one) for one in own)
        for e in given
        if e.rank != rank
    )


def loss_origins(window: RoundWindow) -> tuple[int, ...]:
    """Ranks whose own values made losses nonfinite: whoever only received them is left out, whoever gave them is not."""
    lost = window.ranks_of(Phase.LOSS)
    receivers = {r for r in lost if received_through_activation(window, r) or received_from_another(window, r)}
    gave = {e.rank for e in window.of_phase(Phase.WIRE) if role_of(e) is Role.ACTIVATION} if receivers else set()
    born = {rank for rank in {*lost, *gave} - receivers if not received_through_activation(window, rank)}
    return tuple(sorted(born)) or lost


def state_origins(window: RoundWindow, seen: tuple[int, ...]) -> tuple[int, ...]:
    """Of ranks whose parameters or buffers are nonfinite, those to which no other rank handed them so.

    DDP broadcasts rank 0's buffers, its constructor rank 0's parameters too; a sharded optimizer every rank's part of them.
    """
    handed = [e for e in window.of_phase(Phase.WIRE) if e.collective is not None and e.collective.op in _HANDED]
    gave = {e.rank for e in handed}
    started = {e.rank for e in window.of_phase(Phase.INIT, Phase.BUFFERS) if e.note == HANDED}
    return tuple(r for r in seen if r not in started and (r in gave or not any(_reaches(e, r) for e in handed))) or seen


def _is_sent(evidence: Evidence) -> bool:
    return evidence.collective is not None and evidence.collective.op == "send"


def _reaches(given: Evidence, rank: int) -> bool:
    one = given.collective
    return one is not None and one.reduce_op in _SPREADING and (not one.ranks or rank in one.ranks)


def _precedes_gradients(window: RoundWindow, given: Evidence) -> bool:
    """Was it given before anything of the same rank's backward was?"""
    later = (e.order for e in window.gradient_evidence() if e.rank == given.rank)
    return given.order < min(later, default=given.order + 1)


_HANDED = frozenset({"broadcast_"})
_SPREADING = frozenset({"SUM", "AVG", "PRODUCT", "GATHER"})


def raw_origins(window: RoundWindow) -> tuple[int, ...]:
    """Ranks whose own gradients were nonfinite before any reduction.

    Left out are receivers of activations and other values of the forward, and ranks of which it is not known what they met first.
    """
    first: dict[int, Evidence] = {}
    for evidence in window.gradient_evidence():
        if raw_is_nonfinite(evidence):
            first.setdefault(evidence.rank, evidence)
    return tuple(
        rank
        for rank, evidence in sorted(first.items())
        if window.gapless(evidence)
        and not received_through_activation(window, rank)
        and not received_from_another(window, rank)
    )


def gave_nonfinite(window: RoundWindow, like: Evidence) -> tuple[int, ...]:
    """Ranks that put nonfinite values into the very collective that ``like`` is about."""
    return tuple(sorted({e.rank for e in window.of_phase(Phase.WIRE) if _is_same(e, like)}))


def raw_nonfinite_ranks(window: RoundWindow) -> tuple[int, ...]:
    """Ranks whose own gradients were nonfinite, however the value reached them."""
    return tuple(sorted({e.rank for e in window.gradient_evidence() if raw_is_nonfinite(e)}))


def wire_origins(window: RoundWindow) -> list[Evidence]:
    """First evidence of each rank that put nonfinite values on the wire though its gradients were finite.

    A rank that had already received a nonfinite result of a gradient's collective in this round only passes it on.
    """
    first: dict[int, Evidence] = {}
    received: dict[int, list[Evidence]] = {}
    for evidence in window.gradient_evidence():
        if evidence.phase is Phase.REDUCED and evidence.note != LATE:
            received.setdefault(evidence.rank, []).append(evidence)
    for evidence in window.gradient_evidence():
        passed_on = any(_is_before(result, evidence) for result in received.get(evidence.rank, ()))
        if evidence.phase is Phase.WIRE and not raw_is_nonfinite(evidence) and not passed_on:
            first.setdefault(evidence.rank, evidence)
    return [first[rank] for rank in sorted(first) if window.gapless(first[rank])]


def _is_before(result: Evidence, given: Evidence) -> bool:
    """Did the result exist before the other collective was given its input? Within a group their numbers say; results are looked
    at later than they arrive, so across groups the rank's own order is the best that is known."""
    a, b = result.collective, given.collective
    if a is not None and b is not None and (a.group, a.ranks) == (b.group, b.ranks):
        return a.index < b.index
    return result.order < given.order


def first_reduced(window: RoundWindow, role: Role | None = None) -> Evidence | None:
    """The earliest nonfinite result of a gradient's (or the given role's) collective: smallest index, then lowest rank."""
    found = [e for e in window.of_phase(Phase.REDUCED) if e.collective is not None and _role_matches(e, role)]
    return min(found, key=lambda e: (e.collective.index if e.collective else 0, e.rank), default=None)


def _role_matches(evidence: Evidence, role: Role | None) -> bool:
    if role is not None:
        return role_of(evidence) is role
    return role_of(evidence) in (Role.GRADIENT, Role.DERIVED)


def same_collective(window: RoundWindow, like: Evidence) -> list[Evidence]:
    """Every rank's REDUCED evidence of the collective that ``like`` is about."""
    return [e for e in window.of_phase(Phase.REDUCED) if _is_same(e, like)]


def _is_same(one: Evidence, other: Evidence) -> bool:
    """Both are about one collective: same group, by name and ranks, and same number in it."""
    a, b = one.collective, other.collective
    return a is not None and b is not None and (a.group, a.ranks, a.index) == (b.group, b.ranks, b.index)


def sum_may_overflow(results: Iterable[Evidence], size: int, dtype: str) -> tuple[bool, float]:
    """Can the sum of the ranks' inputs leave the dtype's range? Also returns the bound on the sum.

    Bound: |sum_r x_r| <= sum_r max|x_r|. A rank that reported no result (reduce-scatter: it does not own the element) is
    counted with the largest input that was reported.
    """
    largest = {e.rank: e.collective.wire.absmax for e in results if e.collective is not None}
    if not largest:
        return False, 0.0
    bound = sum(largest.values()) + (size - len(largest)) * max(largest.values())
    return bound > FINITE_MAX.get(dtype, float("inf")), bound
