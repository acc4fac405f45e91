"""Every collective that reduces: what it was given, what it returned, whose gradients they were.

Owns the wire tap's listening side. Latches evidence with the ledger; waiting for results is ``pending.py``'s, whose reduction it is
``roles.py``'s, which parameters are replicated ``replicas.py``'s.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import takewhile
from typing import Any, Protocol

import torch

from sentinel.wire.messages import CHAINED, LATE, Check, Collective, Phase, Role
from sentinel_agent import roles
from sentinel_agent.agreement import of_fsdp
from sentinel_agent.bucketlayout import BucketLayouts
from sentinel_agent.buckets import Bucket, quick_look
from sentinel_agent.check import NORM_FROM, Checker, given_part, l2_norm, local_part, norms_of
from sentinel_agent.fingerprint import SMALL, Audit, fingerprint, float_sum, its_turn
from sentinel_agent.guard import Guard
from sentinel_agent.identity import Identity
from sentinel_agent.layernorms import LayerNorms
from sentinel_agent.moves import Moves
from sentinel_agent.pending import Pending, written_since
from sentinel_agent.replicas import Replicas
from sentinel_agent.rounds import Reduction, Round
from sentinel_agent.scan import Scan
from sentinel_agent.taps import comm_hook, fsdp
from sentinel_agent.taps.wire import MOVES, Call, Reader, group_of, work_of

_COMMON = frozenset({torch.float32, torch.bfloat16, torch.float16})


class RoundKeeper(Protocol):
    """Where the open round is kept and evidence is latched; ``ledger.Ledger`` is one."""

    round: Round

    def latch(self, phase: Phase, found: Check, reduction: Reduction | None = None) -> None:
        """Send evidence and remember that the open round has some."""


class Reductions:
    """Listens to the wire tap on behalf of a ledger."""

    def __init__(self, identity: Identity, checker: Checker, scan: Scan, ledger: RoundKeeper, guard: Guard) -> None:
        self._checker = checker
        self.guard = guard
        self._scan = scan
        self._ledger = ledger
        self.layouts = roles.Layouts()
        self.replicas = Replicas(identity.world_size)
        self.norms = LayerNorms(identity.rank)
        self.moves = Moves(checker, ledger)
        self.buckets = BucketLayouts(self.layouts.parameters)
        self._unbooked: deque[Bucket] = deque()
        self._optimized = 0  # parameters that the optimizers stepped when layouts were learnt
        self.pending = Pending(self._finish, identity.health, self.book, self._look_at_bucket)

    def before(self, read: Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reduction | Bucket | None:
        """Check what a collective is given."""
        if read.op in MOVES:
            return self.moves.before(read, args, kwargs)
        if roles.in_backward() and roles.from_autograd() and not comm_hook.running():
            bucket = quick_look(read, args, kwargs)
            if bucket is not None:
                return self._keep(bucket)
        self.book()
        return self._before(read, args, kwargs)

    def _keep(self, bucket: Bucket) -> Bucket:
        """Book it later; only a sum that is to be compared cannot wait, since the collective is about to write."""
        round_ = self._ledger.round
        bucket.turn, round_.buckets = round_.buckets, round_.buckets + 1
        if its_turn(bucket.found.numel, bucket.turn, round_.number) and bucket.parts[0].dtype is torch.float32:
            bucket.sum_in = float_sum(bucket.parts)
        self._unbooked.append(bucket)
        return bucket

    def book(self) -> None:
        """Book what was only looked at, in the order it came: before anything else is, and when backward ends."""
        while self._unbooked:
            bucket = self._unbooked.popleft()
            call = bucket.read(bucket.args, bucket.kwargs)
            bucket.args, bucket.kwargs = (), {}
            reduction = bucket.reduction = self._reduction(call, bucket.parts, bucket.found, Role.GRADIENT, True)
            reduction.turn, reduction.sum_in = bucket.turn, bucket.sum_in
            bucket.work = work_of(bucket.result) if bucket.result is not None else None
            self._note_gradient(reduction)
            self.replicas.issued(reduction, None)

    def _before(self, read: Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reduction | None:
        call = read(args, kwargs)
        parts = [part for tensor in call.inputs if (part := given_part(tensor)) is not None]
        if not parts:
            return None
        self.learn_layouts()
        backward = roles.in_backward() or self._ledger.round.backward_elsewhere()
        who = roles.caller()
        role = roles.role(
            parts, who, backward=backward, after_backward=self._ledger.round.between, layouts=self.layouts
        )
        reduce_op = "SUM" if who is roles.Caller.AUTOGRAD else call.reduce_op
        if reduce_op in ("MIN", "MAX") and role is not Role.SCALAR:
            role = Role.ACTIVATION
        found = self._checker.check_parts(parts)
        if found is None:
            return None
        from_autograd = who is roles.Caller.AUTOGRAD
        reduction = self._reduction(call, parts, found, role, from_autograd, reduce_op)
        if from_autograd:
            reduction.turn, self._ledger.round.buckets = self._ledger.round.buckets, self._ledger.round.buckets + 1
        if call.op == "allreduce_" and not reduction.steady:
            known = not any(tensor.is_inference() for tensor in reduction.outputs)  # those have no version
            reduction.versions = tuple(tensor._version for tensor in reduction.outputs) if known else ()
        round_ = self._ledger.round
        if role is not Role.SCALAR and not (backward or round_.forwards or round_.backwards):
            round_.averaged = round_.number > 0
        if role is Role.GRADIENT:
            self._gradient_issued(reduction, parts, who)
            if reduction.steady and self._audits(reduction) and not found.nonfinite:
                reduction.sum_in = float_sum(parts)
        elif role is Role.DERIVED:
            round_.carried = True
        elif role is Role.ACTIVATION:
            round_.activations += 1
        if found.nonfinite:
            self._blame_wire(reduction, parts)
        reduction.work = (backward, who, call.waits)
        return None if role is Role.SCALAR else reduction

    def _reduction(
        self,
        call: Call,
        parts: list[torch.Tensor],
        found: Check,
        role: Role,
        from_autograd: bool,
        reduce_op: str = "SUM",
    ) -> Reduction:
        group, ranks = group_of(call.group)
        index = self._ledger.round.next_index(group)
        return Reduction(
            op=call.op,
            group=group,
            ranks=ranks,
            index=index,
            turn=index,
            reduce_op=reduce_op,
            dtype=str(parts[0].dtype).removeprefix("torch."),
            role=role,
            wire=found,
            outputs=call.outputs,
            steady=call.waits or from_autograd,
        )

    def _gradient_issued(self, reduction: Reduction, parts: list[torch.Tensor], who: roles.Caller) -> None:
        reduction.sharded = of_fsdp(who)
        self._note_gradient(reduction)
        names = reduction.names = self._names_behind(parts, who)
        if names is not None and reduction.sharded and self.norms.wanted(self._ledger.round.number):
            norm = math.nan if reduction.wire.nonfinite else l2_norm(parts, reduction.wire)
            self.norms.note((_block(names),), (norm,))  # before the reduction: all of it is here
        if (
            reduction.op == "allreduce_"
            and names
            and who is roles.Caller.USER
            and not (reduction.steady or comm_hook.running())
        ):
            reduction.given_away = all(tensor.device.type == "cpu" for tensor in reduction.outputs)
        foreign = who is roles.Caller.USER and self._is_foreign(parts, names)
        chained = not roles.in_backward() and self._ledger.round.backward_elsewhere()
        reduction.chained = comm_hook.issues() or chained
        self.replicas.issued(reduction, names, foreign=foreign, in_hook=comm_hook.running() or chained)
        if names and reduction.op.startswith("allreduce") and who is roles.Caller.USER:
            size = len(reduction.ranks) or self.replicas.world_size
            self.replicas.replicate(reduction.group, size, self.layouts.owners_of(parts))

    def _note_gradient(self, reduction: Reduction) -> None:
        """The open round has one more gradient collective."""
        round_ = self._ledger.round
        round_.dirty = round_.synced = round_.reducing = True
        round_.weigh(reduction.wire, reduction.dtype)
        self.guard.issued(reduction, round_)

    def _names_behind(self, parts: list[torch.Tensor], who: roles.Caller) -> tuple[str, ...] | None:
        """Parameters of a gradient collective, where that can be told: FSDP says so, a loop reduces ``.grad`` itself."""
        sharded = fsdp.current()
        if sharded is not None:
            return sharded.names
        if comm_hook.running():
            return self.layouts.names_behind(comm_hook.parameters())
        return self.layouts.names_of(parts) if who is roles.Caller.USER and not roles.in_backward() else None

    def _is_foreign(self, parts: list[torch.Tensor], names: tuple[str, ...] | None) -> bool:
        """A loop reduces one tensor that looks like a parameter's gradient and is none."""
        return names is None and not roles.in_backward() and len(parts) == 1 and self.layouts.has_shape(parts[0])

    def _audits(self, reduction: Reduction) -> bool:
        """Is it this collective's turn to have its sums compared? Half precisions only while small: their sums are slow."""
        if not reduction.op.startswith("allreduce") or reduction.reduce_op not in ("SUM", "AVG"):
            return False
        if reduction.dtype in ("float16", "bfloat16") and reduction.wire.numel > SMALL:
            return False
        return its_turn(reduction.wire.numel, reduction.turn, self._ledger.round.number)

    def after(self, reduction: Reduction | Bucket, result: Any) -> None:
        """The collective is on its way: see to it that its result is checked before anybody can write to it."""
        if type(reduction) is Bucket:
            reduction.result = result
            self.pending.at_end_of_backward(reduction)
            return
        assert type(reduction) is Reduction
        if reduction.op in MOVES:
            self.moves.after(reduction, result)
            return
        backward, who, waits = reduction.work
        reduction.work = work_of(result)
        if waits:
            self.pending.now(reduction)
        elif backward and who is roles.Caller.AUTOGRAD:
            self.pending.at_end_of_backward(reduction)
        else:
            self.pending.when_complete(reduction)

    def learn_layouts(self, *, unfrozen: bool = False) -> None:
        """Make sure that the parameters' shapes are known; ``unfrozen``: those of parameters that were not trained before, too."""
        naming = self._scan.naming
        if not self.layouts.known or (unfrozen and (self.layouts.outdated() or naming.optimized() != self._optimized)):
            self.layouts.learn(naming.parameters())
            self._optimized = naming.optimized()

    def _blame_wire(self, reduction: Reduction, parts: list[torch.Tensor]) -> None:
        """The wire is nonfinite: whose gradients are, and were they so before the cast?"""
        if reduction.role in (Role.GRADIENT, Role.DERIVED):
            raw = self._scan.raw(reduction, parts, self._ledger.round.reduced_storages)
            reduction.raw, reduction.narrowed = (raw.found if raw.looked else None), raw.narrowed
            reduction.parameters, reduction.parameters_total = raw.names, raw.total
            self._keep_raw(parts, raw.names)
        self._ledger.latch(Phase.WIRE, reduction.wire, reduction)

    def _keep_raw(self, parts: list[torch.Tensor], names: tuple[str, ...]) -> None:
        """Clone nonfinite gradients now: the collective is about to write them, and a replay compares them bit by bit."""
        kept = self._ledger.round.raw_gradients
        sharded = fsdp.current()
        if sharded is not None:
            kept.keep(sharded.read_back(parts[0]), names)
        elif names:
            reduced = self._ledger.round.reduced_storages
            local = ((n, p.grad) for n, p in self._scan.naming.parameters() if p.grad is not None)
            kept.keep(((n, g) for n, g in local if roles.storage_of(g) not in reduced), names)

    def _finish(self, waiting: Reduction | Bucket) -> None:
        """Check what a collective returned."""
        if type(waiting) is Bucket:
            self._finish_bucket(waiting)
            return
        reduction = waiting
        assert type(reduction) is Reduction
        parts = [part for tensor in reduction.outputs if (part := given_part(tensor)) is not None]
        found = self._checker.check_parts(parts)
        reduction.late = written_since(reduction)
        if reduction.role is Role.GRADIENT:
            self._ledger.round.reduced_storages.update(
                roles.storage_of(t) for t in reduction.outputs if not t.is_sparse
            )
            if found is not None and reduction.steady and reduction.op.startswith("allreduce"):
                norm = self._fingerprint(reduction, parts, found)
                self._note_norms(reduction, parts, math.nan if found.nonfinite else norm)
        self._returned(reduction, found)

    def _look_at_bucket(self, bucket: Bucket) -> None:
        """Read what came back in a bucket: it was reduced in place, and is one large gradient tensor."""
        bucket.returned = self._by_layer(bucket) or self._checker.check_parts(bucket.parts)

    def _finish_bucket(self, bucket: Bucket) -> None:
        """Book what was read."""
        reduction, found = bucket.reduction, bucket.returned
        assert reduction is not None  # it is booked before anybody waits for it
        assert found is not None
        self._ledger.round.reduced_storages.add(bucket.parts[0].untyped_storage().data_ptr())
        self._fingerprint(reduction, bucket.parts, found)
        self._returned(reduction, found)

    def _note_norms(self, reduction: Reduction, parts: list[torch.Tensor], norm: float) -> None:
        """A loop's own reduction of one gradient has its norm; a small bucket of DDP's is read once more."""
        if not self.norms.wanted(self._ledger.round.number):
            return
        if reduction.names is not None and len(reduction.names) == 1:
            self.norms.note(reduction.names, (norm,))
        elif reduction.names is None and self.norms.closely(self._ledger.round.number) and _is_small(parts):
            layout = self.buckets.of(parts[0])
            if layout is not None:
                self.norms.note(layout.names, norms_of(torch.split(parts[0], list(layout.sizes))))

    def _by_layer(self, bucket: Bucket) -> Check | None:
        """Check a bucket parameter by parameter, if that is worth it in this round and it is known what lies where."""
        if not self.norms.closely(self._ledger.round.number):
            return None
        layout = self.buckets.of(bucket.parts[0])
        looked = self._checker.check_pieces(bucket.parts[0], layout.sizes) if layout is not None else None
        if layout is None or looked is None:
            return None
        self.norms.note(layout.names, looked[1])
        return looked[0]

    def backward_ended(self) -> None:
        """Every gradient is in its place: learn what lies where in new buckets, and look at norms that nothing has told."""
        self.buckets.backward_ended()
        round_ = self._ledger.round
        broken = round_.gradient_nonfinite and not round_.echoes
        reducing = round_.reducing or self.replicas.world_size == 1
        if not (reducing and self.norms.looked_for(round_.number, broken=broken)):
            return
        parts = {name: part for name, g in self.layouts.gradients() if (part := local_part(g)) is not None}
        device = next((part.device for part in parts.values()), None)
        plain = {name: p for name, p in parts.items() if p.dtype in _COMMON and p.device == device}
        if plain:
            self.norms.note(list(plain), norms_of(list(plain.values())))

    def _returned(self, reduction: Reduction, found: Check | None) -> None:
        """A result was looked at."""
        reduction.outputs, reduction.work, reduction.reduced = [], None, found
        if found is not None and found.nonfinite:
            if reduction.role is Role.GRADIENT:
                self.guard.returned_nonfinite(reduction, self._ledger.round)
            self._ledger.latch(Phase.REDUCED, found, reduction)

    def _fingerprint(self, reduction: Reduction, parts: list[torch.Tensor], found: Check) -> float:
        """Note what an all-reduce returned: it must be the same on every rank, and the sum of what they gave. Its norm."""
        words = None
        if its_turn(found.numel, reduction.index, self._ledger.round.number):
            words = fingerprint(parts)
        audit = None
        if reduction.sum_in is not None and not found.nonfinite:
            total = float_sum(parts)
            wire, op, dtype = reduction.wire, reduction.reduce_op, reduction.dtype
            audit = Audit(reduction.index, reduction.sum_in, total, wire.numel, wire.absmax, op, dtype)
        norm = l2_norm(parts, found)
        self.replicas.returned(reduction, norm, words, audit)
        return norm


def _is_small(parts: list[torch.Tensor]) -> bool:
    """One common tensor that is quickly read once more."""
    return len(parts) == 1 and parts[0].numel() <= NORM_FROM and parts[0].dtype in _COMMON


def _block(names: tuple[str, ...]) -> str:
    """What FSDP reduces together, named by what the parameters' names share; as a parameter of that layer."""
    shared = takewhile(lambda words: len(set(words)) == 1, zip(*(name.split(".") for name in names), strict=False))
    return ".".join([*(words[0] for words in shared), "*"])


def note_of(phase: Phase, reduction: Reduction) -> str:
    """What is to be known of evidence about this collective in this phase."""
    if phase is Phase.WIRE and reduction.chained:
        return CHAINED
    return LATE if phase is Phase.REDUCED and reduction.late else ""


def collective_of(reduction: Reduction) -> Collective:
    """The reduction as it goes on the wire."""
    return Collective(
        group=reduction.group,
        ranks=reduction.ranks,
        index=reduction.index,
        op=reduction.op,
        reduce_op=reduction.reduce_op,
        dtype=reduction.dtype,
        role=reduction.role,
        wire=reduction.wire,
        reduced=reduction.reduced,
        raw=reduction.raw,
        narrowed=reduction.narrowed,
    )
