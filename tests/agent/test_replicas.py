"""What ranks compare of their reductions: only what comes in one order on all of them."""

from __future__ import annotations

from sentinel.wire.messages import Check, GroupSync, Role
from sentinel_agent.replicas import Replicas
from sentinel_agent.rounds import Reduction


def reduction(numel: int, *, steady: bool) -> Reduction:
    """An all-reduce of ``numel`` elements over both ranks, given to the default group."""
    return Reduction(
        op="allreduce_",
        group="0",
        ranks=(),
        index=0,
        reduce_op="SUM",
        dtype="float32",
        role=Role.GRADIENT,
        wire=Check(numel, 0, 0, 1.0),
        steady=steady,
    )


def synced(sizes: tuple[int, ...], *, in_hook: bool) -> GroupSync:
    """A round's record of a rank that issued all-reduces of these sizes in this order."""
    replicas = Replicas(world_size=2)
    for numel in sizes:
        replicas.issued(reduction(numel, steady=not in_hook), None, in_hook=in_hook)
    (record,) = replicas.close()
    return record


def test_the_order_of_a_loop_is_compared() -> None:
    """The same all-reduces in another order are another identity, where the loop itself issues them."""
    assert synced((8, 16), in_hook=False) != synced((16, 8), in_hook=False)
    assert synced((8, 16), in_hook=False).collectives == 2


def test_the_order_of_a_hook_is_not() -> None:
    """Futures that a communication hook chains run in no order that ranks share, or not yet: nothing of it is compared."""
    assert synced((8, 16), in_hook=True) == synced((16, 8), in_hook=True) == synced((8,), in_hook=True)
