"""Collectives that hand values on without reducing them: gathered embeddings, tokens for experts, a pipeline's activations.

Owns what they were given and what came of a point-to-point receive. NaN in it is only told once something of the training is
nonfinite: what is padded with NaN on purpose says nothing by itself. Only a pipeline's send is told at once, since its sender may
never see a loss. Nothing is waited for: a receive is looked at where its user has already waited for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from sentinel.wire.messages import Check, Phase, Role
from sentinel_agent import roles
from sentinel_agent.check import EMPTY, Checker, given_part, local_part, merged
from sentinel_agent.rounds import Received, Reduction, Round
from sentinel_agent.taps import comm_hook
from sentinel_agent.taps.wire import Call, Reader, group_of, work_of

MAX_GIVEN: Final = 8
"""Gatherings of one round that are remembered for what they were given."""
MAX_RECEIVED: Final = 4
"""The same of receives, the last ones: a backend's Work keeps its tensor alive, and a pipeline's are large."""
EXCHANGES: Final = frozenset({"alltoall_base_", "alltoall_"})
"""As sends are, a sign that ranks hold parts of one model, whose parameters may well differ."""
STATE: Final = "broadcast_"
"""How a rank hands its parameters and buffers to the others before the training begins."""
FINITE: Final = Check(0, 0, 0, 0.0)


class Keeper(Protocol):
    """Where the open round is kept; ``ledger.Ledger`` is one."""

    round: Round

    def latch(self, phase: Phase, found: Check, reduction: Reduction | None = None) -> None:
        """Send evidence."""


class Moves:
    """Listens to the wire tap's moves on behalf of a ledger."""

    def __init__(self, checker: Checker, ledger: Keeper) -> None:
        self._checker = checker
        self._ledger = ledger
        self._replaced = 0  # elements that other ranks' broadcasts have written before the very first forward
        self._held = EMPTY  # what was in their place

    def before(self, read: Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reduction | None:
        """Look at what is given. Returns the receive whose result ``after`` is to hear of."""
        if read.op in ("send", "recv_"):
            return self._between_two(read, args, kwargs)
        round_ = self._ledger.round
        spread = read.op in ("broadcast_", "scatter_")  # by one rank, often before the forward that uses it
        if round_.between:  # it may be gradients that are averaged by hand
            round_.carried |= _holds_values(read(args, kwargs))
            return None
        if not round_.forwards and round_.number and not round_.averaged:
            round_.averaged = _holds_values(read(args, kwargs))
        begun = round_.forwards or (spread and round_.number)  # at the very first, parameters are handed round
        if not begun and not round_.number and read.op == STATE:
            self._before_training(read, args, kwargs)
        if not begun or roles.in_backward() or round_.backward_elsewhere():
            return None
        if comm_hook.running() or roles.caller() is roles.Caller.GRADIENT_HOOK:
            return None  # FSDP gathers its parameters so
        call = read(args, kwargs)
        round_.activations += read.op in EXCHANGES and _holds_values(call)
        group, ranks = group_of(call.group)
        name = f"{group} {read.op.strip('_')}" if spread else f"{group} gather"
        index = round_.next_index(name)
        if spread and not _is_root(call, read.pick(args, kwargs, "root_rank", 0)):
            return None
        found = self._look(call, several=spread)
        if found is not None and found.nan and len(round_.given) < MAX_GIVEN:
            round_.given.append(_move(call, name, ranks, index, found))
        return None

    def after(self, move: Reduction, result: Any) -> None:
        """A receive is on its way."""
        received = self._ledger.round.received
        del received[: max(0, len(received) - MAX_RECEIVED + 1)]
        work = work_of(result)
        received.extend(Received(weakref.ref(t), t._version, work, move) for t in move.outputs if not t.is_inference())
        move.outputs = []

    def _before_training(self, read: Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Another rank is about to write this one's state, as DDP's constructor has rank 0 do: what did it hold itself?"""
        call = read(args, kwargs)
        if _is_root(call, read.pick(args, kwargs, "root_rank", 0)):
            return
        parts = [part for tensor in call.inputs if (part := given_part(tensor)) is not None]
        self._replaced += sum(part.numel() for part in parts)
        found = self._checker.check_parts(parts)
        self._held = merged(self._held, found) if found is not None else self._held

    def were_handed(self, found: Check) -> bool:
        """Has another rank handed this one the state that was ``found`` nonfinite, and was what it replaced finite?"""
        return self._replaced >= found.numel and not (self._held.nan if found.nan else self._held.inf)

    def tell(self) -> None:
        """Something is nonfinite: what was given and received before came first, and is told first."""
        round_ = self._ledger.round
        given, round_.given = round_.given, []
        received, round_.received = round_.received, []
        for one in given:
            self._ledger.latch(Phase.WIRE, one.wire, one)
        for one, found in self._found(received):
            self._ledger.latch(Phase.REDUCED, found, one)

    def _found(self, received: list[Received]) -> Iterator[tuple[Reduction, Check]]:
        for one in received:
            part = _contents(one)
            found = self._checker.check_parts([part]) if part is not None else None
            if found is not None and found.nan:
                one.move.reduced = found
                yield one.move, found

    def _between_two(self, read: Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reduction | None:
        """A pipeline's send or receive: numbered by the two ranks, so that what one gave can be held against what the other got."""
        call = read(args, kwargs)
        group, ranks = group_of(call.group)
        process_group = dist.ProcessGroup.unbox(call.group)
        me, sends = process_group.rank(), read.op == "send"
        peer = read.pick(args, kwargs, "dst" if sends else "src", me)
        path = (me, peer) if sends else (peer, me)
        between = tuple(ranks[rank] for rank in path) if ranks else path
        name = f"{group} {between[0]} to {between[1]}"
        index = self._ledger.round.next_index(name)
        self._ledger.round.activations += _holds_values(call)
        if not sends:
            tensors = [t for t in call.inputs if _is_value(t)]
            return _move(call, name, between, index, FINITE, tensors) if tensors else None
        found = self._look(call, several=True)
        if found is not None and found.nan:
            self.tell()
            self._ledger.latch(Phase.WIRE, found, _move(call, name, between, index, found))
        return None

    def _look(self, call: Call, *, several: bool) -> Check | None:
        """Check of what a call was given; ``several``: of single numbers (a metric, a flag) nothing.

        In the host's memory only: a model that is gathered layer by layer would wait for its accelerator at each of them.
        """
        parts = [part for tensor in call.inputs if (part := given_part(tensor)) is not None]
        return self._checker.check_parts(
            [p for p in parts if p.device.type == "cpu" and (p.numel() > 1 or not several)]
        )


def _is_root(call: Call, root: int) -> bool:
    return bool(dist.ProcessGroup.unbox(call.group).rank() == root)


def _is_value(tensor: torch.Tensor) -> bool:
    """No index, flag or metric."""
    return tensor.is_floating_point() and tensor.numel() > 1


def _holds_values(call: Call) -> bool:
    return any(_is_value(tensor) for tensor in call.inputs)


def _move(
    call: Call,
    group: str,
    ranks: tuple[int, ...],
    index: int,
    found: Check,
    outputs: list[torch.Tensor] | None = None,
) -> Reduction:
    dtype = str(call.inputs[0].dtype).removeprefix("torch.")
    return Reduction(call.op, group, ranks, index, "GATHER", dtype, Role.ACTIVATION, found, outputs=outputs or [])


def _contents(received: Received) -> torch.Tensor | None:
    """What was received, None if it has not come, is gone, or is not what came any more."""
    tensor = received.tensor()
    if tensor is None or tensor._version != received.version or not _is_done(received.work):
        return None
    part = local_part(tensor.detach())  # its memory may have been given back since
    return part if part is not None and part.device.type == "cpu" else None


def _is_done(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return False
