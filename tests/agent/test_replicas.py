"""What ranks compare of their reductions: only what comes in one order on all of them."""

from __future__ import annotations

import torch

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


class Loop:
    """A hand-written loop over parameters a and b, that says what it does to the bookkeeping of one rank."""

    def __init__(self) -> None:
        self.replicas = Replicas(world_size=2)
        self._gradients = {name: torch.zeros(2) for name in "ab"}

    def backward(self, *names: str) -> Loop:
        """A backward that adds to these gradients."""
        self.replicas.backward_begins(self._gradients.items())
        for name in names:
            self._gradients[name] += 1.0
        self.replicas.backward_ended(self._gradients.items())
        return self

    def flat(self) -> Loop:
        """Something flat is all-reduced: whose, nobody knows."""
        self.replicas.issued(reduction(4, steady=True), None)
        return self


def test_what_is_reduced_without_names_is_what_was_there() -> None:
    """All gradients of the backwards so far; what a later backward adds to is not reduced by that."""
    assert Loop().backward("a", "b").flat().replicas.unreduced() == []
    assert Loop().backward("a", "b").flat().backward("b").replicas.unreduced() == ["b"]
    assert Loop().backward("a").flat().backward("b").flat().replicas.unreduced() == []


def test_averaged_weights_reduce_no_gradient_that_comes_later() -> None:
    """Local SGD averages one flat vector before the forward, which looks like a flat buffer of gradients."""
    assert Loop().flat().backward("a", "b").replicas.unreduced() == ["a", "b"]
