"""What ranks hand each other without reducing it: looked at as it is given, or received, and told only with what came of it."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from watched import Watched

from sentinel.wire.messages import HANDED, Check, Phase, Role
from sentinel_agent import moves
from sentinel_agent.rounds import Received, Reduction

NAN = torch.tensor([1.0, float("nan")])


def gather(tensor: torch.Tensor) -> None:
    """As a contrastive loss gathers embeddings."""
    dist.all_gather([torch.empty_like(tensor)], tensor)


def model_of(watched: Watched) -> nn.Module:
    """A model that is watched."""
    model = nn.Linear(2, 1)
    watched.agent.root_made(model)
    return model


def step(model: nn.Module, tensor: torch.Tensor, *, breaks: bool) -> None:
    """A round whose forward gathers ``tensor``, and whose loss is nonfinite if it ``breaks``."""
    output = model(torch.ones(1, 2)).sum()
    gather(torch.ones(2))
    gather(tensor)
    (output * float("nan") if breaks else output).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_nan_given_to_a_gathering_is_told_before_what_came_of_it(watched: Watched) -> None:
    """As an activation's, numbered apart from the reductions of its group, and before the loss that it spoilt."""
    step(model_of(watched), NAN, breaks=True)
    seen, loss = watched.evidence(Phase.WIRE, Phase.LOSS)
    assert seen.collective is not None
    assert (seen.collective.op, seen.collective.role) == ("allgather_", Role.ACTIVATION)
    assert (seen.collective.reduce_op, seen.collective.index) == ("GATHER", 1)
    assert seen.collective.group.endswith(" gather")
    assert (seen.check.nan, seen.order, loss.phase, loss.order) == (1, 0, Phase.LOSS, 1)


@pytest.mark.parametrize("tensor", [torch.tensor([1, 2]), torch.empty(0), torch.ones(3), torch.tensor([float("-inf")])])
def test_what_is_not_nan_is_not_told(watched: Watched, tensor: torch.Tensor) -> None:
    """Integers, nothing at all, finite values, and the infinities of a mask."""
    step(model_of(watched), tensor, breaks=True)
    assert watched.evidence(Phase.WIRE) == []


def test_nan_that_spoils_nothing_is_not_told(watched: Watched) -> None:
    """What is padded with NaN on purpose, round by round, raises no suspicion."""
    model = model_of(watched)
    for _ in range(3):
        step(model, NAN, breaks=False)
    assert [r.evidence for r in watched.rounds] == [0, 0, 0]


def test_what_is_gathered_after_backward_is_a_metric(watched: Watched) -> None:
    """Nothing of a gradient can come of it, not in the next round either."""
    model = model_of(watched)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    gather(NAN)
    optimizer.step()
    gather(NAN)
    step(model, torch.ones(2), breaks=True)
    assert watched.evidence(Phase.WIRE) == []


def hand_round(watched: Watched, tensor: torch.Tensor) -> None:
    """A healthy round, then one that begins with a broadcast and whose loss breaks."""
    model = model_of(watched)
    step(model, torch.ones(2), breaks=False)
    dist.broadcast(tensor, 0)
    step(model, torch.ones(2), breaks=True)


def test_what_is_broadcast_before_a_forward_is_told(watched: Watched) -> None:
    """A teacher's weights are handed round before the forward that uses them."""
    hand_round(watched, NAN.clone())
    seen, loss = watched.evidence(Phase.WIRE, Phase.LOSS)
    assert seen.collective is not None
    assert (seen.collective.op, seen.collective.reduce_op) == ("broadcast_", "GATHER")
    assert (seen.round, seen.order, loss.order) == (1, 0, 1)


def test_a_single_number_is_no_value_of_the_forward(watched: Watched) -> None:
    """A metric of NaN that rank 0 tells the others explains no loss."""
    hand_round(watched, torch.tensor([float("nan")]))
    assert watched.evidence(Phase.WIRE) == []


def test_a_root_looks_at_its_parameters_once(watched: Watched) -> None:
    """What it broadcasts before the very first forward is what the look at the start sees."""
    counted = watched.agent.checker.count
    dist.broadcast(torch.ones(8), 0)
    assert watched.agent.checker.count == counted


@pytest.mark.parametrize("held", [1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("enough", [True, False])
def test_whose_nonfinite_parameters_they_were(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, held: float, enough: bool
) -> None:
    """Another rank's, if it has broadcast as many as there are, and what was there before was not of that kind itself."""
    model = model_of(watched)
    monkeypatch.setattr(moves, "_is_root", lambda *_: False)
    dist.broadcast(torch.full((3 if enough else 2,), held), 0)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    model(torch.ones(1, 2))
    [seen] = watched.evidence(Phase.INIT)
    assert seen.note == (HANDED if enough and not math.isnan(held) else "")


class Work:
    """A receive, waited for or not."""

    def __init__(self, done: bool | None) -> None:
        self.done = done

    def is_completed(self) -> bool:
        """Has its user waited for it? A backend may fail instead."""
        if self.done is None:
            raise RuntimeError("Connection closed by peer")
        return self.done


def receive(watched: Watched, tensor: torch.Tensor, done: bool | None = True) -> None:
    """The open round has received ``tensor``."""
    move = Reduction("recv_", "0 1 to 0", (1, 0), 4, "GATHER", "float32", Role.ACTIVATION, Check(0, 0, 0, 0.0))
    one = Received(weakref.ref(tensor), tensor._version, Work(done), move)
    watched.agent.ledger.round.received.append(one)


def test_what_was_received_is_told_before_the_loss(watched: Watched) -> None:
    """As the result of an activation's collective: this rank's loss followed from it."""
    received = NAN.clone()
    receive(watched, received)
    watched.agent.ledger.loss(float("nan"))
    seen, loss = watched.evidence()
    assert seen.collective is not None
    assert (seen.phase, seen.collective.op, seen.collective.index) == (Phase.REDUCED, "recv_", 4)
    assert (seen.collective.group, seen.collective.ranks) == ("0 1 to 0", (1, 0))
    assert loss.phase is Phase.LOSS


@pytest.mark.parametrize("what", ["finite", "under way", "failed", "written since", "gone"])
def test_what_is_not_known_to_have_come_as_nan_is_not_told(watched: Watched, what: str) -> None:
    """Nobody is waited for, and a buffer that was used again says nothing of what came in it."""
    received = torch.ones(2) if what == "finite" else NAN.clone()
    receive(watched, received, done={"under way": False, "failed": None}.get(what, True))
    if what == "written since":
        received.mul_(2.0)
    if what == "gone":
        del received
    watched.agent.ledger.loss(float("nan"))
    assert [e.phase for e in watched.evidence()] == [Phase.LOSS]


def test_a_round_keeps_its_last_receives_alone(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline of many micro-batches receives without end before anything may be found: the last few stand for them."""
    monkeypatch.setattr(moves, "work_of", lambda _result: Work(True))
    listener = watched.agent.ledger.reductions.moves
    buffers = [torch.ones(2) for _ in range(moves.MAX_RECEIVED + 3)]
    for index, buffer in enumerate(buffers):
        move = Reduction("recv_", "0 1 to 0", (1, 0), index, "GATHER", "float32", Role.ACTIVATION, Check(0, 0, 0, 0.0))
        move.outputs = [buffer]
        listener.after(move, None)
    kept = watched.agent.ledger.round.received
    assert [one.move.index for one in kept] == list(range(3, moves.MAX_RECEIVED + 3))
    assert [one.tensor() is buffer for one, buffer in zip(kept, buffers[3:], strict=True)] == [
        True
    ] * moves.MAX_RECEIVED


def test_memory_that_was_given_back_is_not_read(watched: Watched) -> None:
    """A freed activation's storage holds nothing, and its version tells nothing of that."""
    received = NAN.clone()
    receive(watched, received)
    received.untyped_storage().resize_(0)
    watched.agent.ledger.loss(float("nan"))
    assert [e.phase for e in watched.evidence()] == [Phase.LOSS]


def test_gradients_that_a_loop_gathers_are_not_called_its_own(watched: Watched) -> None:
    """What a rank makes of all ranks' gathered gradients may be another's NaN."""
    model = model_of(watched)
    model(torch.ones(1, 2)).sum().backward()
    gather(torch.ones(2))
    model.weight.grad.fill_(float("nan"))  # type: ignore[union-attr, operator]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert watched.evidence(Phase.RAW) == []


def test_a_round_forgets_what_it_received(watched: Watched) -> None:
    """Next round's loss is not explained by what came before, nor is a tensor kept alive."""
    model = model_of(watched)
    received = NAN.clone()
    receive(watched, received)
    step(model, torch.ones(2), breaks=False)
    kept = weakref.ref(received)
    del received
    assert kept() is None
    step(model, torch.ones(2), breaks=True)
    assert [e.phase for e in watched.evidence()] == [Phase.LOSS, Phase.RAW, Phase.APPLIED]
