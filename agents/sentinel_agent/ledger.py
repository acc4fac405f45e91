"""What this rank saw this round: latched in the hot path, judged once at the round's end.

Owns the clock (which call closes a round, and which step of the user's loop it was) and the sending of evidence. The taps call
it; checks are ``check.py``'s, waiting for results ``pending.py``'s, looking at parameters ``scan.py``'s, writing parts
``evidence.py``'s.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from sentinel.wire.messages import Check, ClosedBy, Collective, Evidence, Phase, Role, RoundClosed, Weights
from sentinel_agent import roles
from sentinel_agent.check import Checker, local_part
from sentinel_agent.fingerprint import SMALL, Audit, fingerprint, float_sum, its_turn
from sentinel_agent.identity import Identity
from sentinel_agent.pending import Pending
from sentinel_agent.replicas import Replicas, weights_due
from sentinel_agent.rounds import Reduction, Round
from sentinel_agent.scan import MAX_NAMES, Scan, Scanned
from sentinel_agent.taps import fsdp
from sentinel_agent.taps.wire import Reader, group_of, work_of

NO_CHECK = Check(0, 0, 0, 0.0)
MAX_EVIDENCE = 256
"""Evidence sent per round and rank; one is enough for a verdict, the rest only says how far it spread."""


class Ledger:
    """The open round of this rank, and the history the clock needs.

    ``send`` queues a report; ``on_suspicious(round, step, closed_by)`` is called at the close of a round that latched something a
    scaler does not explain; ``on_closed(round, step, loss)`` at the close of every round.
    """

    def __init__(
        self,
        identity: Identity,
        checker: Checker,
        scan: Scan,
        send: Callable[[Any], None],
        on_suspicious: Callable[[Round, int, str], None],
        on_closed: Callable[[int, int, float | None], None],
    ) -> None:
        self._me = identity
        self._checker = checker
        self._scan = scan
        self._send = send
        self._on_suspicious = on_suspicious
        self._on_closed = on_closed
        self.layouts = roles.Layouts()
        self.replicas = Replicas(identity.world_size)
        self.pending = Pending(self._finish, identity.health)
        self.round = Round(0)
        self._steps = 0  # closed rounds of the first optimizer
        self._first: weakref.ref[torch.optim.Optimizer] | None = None
        self._lock = threading.Lock()
        self._loss_scale: float | None = None

    # --- the wire tap's listener ---------------------------------------------------------------------------------------

    def before(self, read: Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reduction | None:
        """Check what a collective is given."""
        call = read(args, kwargs)
        parts = [part for tensor in call.inputs if (part := local_part(tensor)) is not None]
        if not parts:
            return None
        self._learn_layouts()
        backward = roles.in_backward()
        who = roles.caller()
        role = roles.role(parts, who, backward=backward, after_backward=self.round.backward_ended, layouts=self.layouts)
        reduce_op = "SUM" if who is roles.Caller.AUTOGRAD else call.reduce_op
        if reduce_op in ("MIN", "MAX") and role is not Role.SCALAR:
            role = Role.ACTIVATION
        found = self._checker.check_parts(parts)
        if found is None:
            return None
        group, ranks = group_of(call.group)
        reduction = Reduction(
            op=call.op,
            group=group,
            ranks=ranks,
            index=self.round.next_index(group),
            reduce_op=reduce_op,
            dtype=str(parts[0].dtype).removeprefix("torch."),
            role=role,
            wire=found,
            outputs=call.outputs,
        )
        if role is Role.GRADIENT:
            self._gradient_issued(reduction, parts, who)
        elif role is Role.ACTIVATION:
            self.round.activations += 1
        if found.nonfinite:
            self._blame_wire(reduction, parts)
        reduction.work = (backward, who, call.waits)
        return None if role is Role.SCALAR else reduction

    def _gradient_issued(self, reduction: Reduction, parts: list[torch.Tensor], who: roles.Caller) -> None:
        self.round.dirty = self.round.synced = True
        self.round.weigh(reduction.wire)
        names = self._names_behind(parts, who)
        self.replicas.issued(reduction, names)
        if names and reduction.op.startswith("allreduce") and who is roles.Caller.USER:
            wanted = set(names)
            self.replicas.replicate(reduction.group, ((n, p) for n, p in self.layouts.parameters() if n in wanted))
        if self._audits(reduction) and not reduction.wire.nonfinite:
            reduction.sum_in = float_sum(parts)

    def _names_behind(self, parts: list[torch.Tensor], who: roles.Caller) -> tuple[str, ...] | None:
        """Parameters of a gradient collective, where that can be told: FSDP says so, a loop reduces ``.grad`` itself."""
        sharded = fsdp.current()
        if sharded is not None:
            return sharded.names
        return self.layouts.names_of(parts) if who is roles.Caller.USER and self.round.backward_ended else None

    def _audits(self, reduction: Reduction) -> bool:
        """Is it this collective's turn to have its sums compared? Half precisions only while small: their sums are slow."""
        if reduction.op != "allreduce_" or reduction.reduce_op not in ("SUM", "AVG"):
            return False
        if reduction.dtype in ("float16", "bfloat16") and reduction.wire.numel > SMALL:
            return False
        return its_turn(reduction.wire.numel, reduction.index, self.round.number)

    def after(self, reduction: Reduction, result: Any) -> None:
        """The collective is on its way: see to it that its result is checked before anybody can write to it."""
        backward, who, waits = reduction.work
        reduction.work = work_of(result)
        if waits:
            self.pending.now(reduction)
        elif backward and who is roles.Caller.AUTOGRAD:
            self.pending.at_end_of_backward(reduction)
        else:
            self.pending.when_complete(reduction)

    def _learn_layouts(self) -> None:
        if not self.layouts.known:
            self.layouts.learn(self._scan.naming.parameters())

    def _blame_wire(self, reduction: Reduction, parts: list[torch.Tensor]) -> None:
        """The wire is nonfinite: whose gradients are, and were they so before the cast?"""
        if reduction.role in (Role.GRADIENT, Role.DERIVED):
            raw = self._scan.raw(reduction, parts, self.round.reduced_storages)
            reduction.raw, reduction.narrowed = raw.found, raw.narrowed
            reduction.parameters, reduction.parameters_total = raw.names, raw.total
        self._latch(Phase.WIRE, reduction.wire, reduction)

    def _finish(self, reduction: Reduction) -> None:
        """Check what a collective returned."""
        parts = [part for tensor in reduction.outputs if (part := local_part(tensor)) is not None]
        found = self._checker.check_parts(parts)
        if reduction.role is Role.GRADIENT:
            self.round.reduced_storages.update(roles.storage_of(t) for t in reduction.outputs if not t.is_sparse)
            if found is not None and reduction.op.startswith("allreduce"):
                self._fingerprint(reduction, parts, found)
        reduction.outputs = []
        reduction.work = None
        reduction.reduced = found
        if found is not None and found.nonfinite:
            self._latch(Phase.REDUCED, found, reduction)

    def _fingerprint(self, reduction: Reduction, parts: list[torch.Tensor], found: Check) -> None:
        """Note what an all-reduce returned: it must be the same on every rank, and the sum of what they gave."""
        words = None
        if its_turn(found.numel, reduction.index, self.round.number):
            words = fingerprint(parts)
        audit = None
        if reduction.sum_in is not None and not found.nonfinite:
            total = float_sum(parts)
            absmax = max(found.absmax, reduction.wire.absmax)
            audit = Audit(
                reduction.index, reduction.sum_in, total, found.numel, absmax, reduction.reduce_op, reduction.dtype
            )
        self.replicas.returned(reduction, found.absmax, words, audit)

    # --- losses, forwards, backwards -----------------------------------------------------------------------------------

    def loss(self, value: float) -> None:
        """The value that backward is called on, unscaled."""
        self.round.loss = value
        if not math.isfinite(value):
            self.round.loss_nonfinite = True
            self._latch(Phase.LOSS, scalar_check(value), value=value)

    def backward_begins(self) -> None:
        """Called before a backward: if the last round's gradients were cleared with no step, that round is over."""
        if self.round.backward_ended and self.round.dirty and self._scan.cleared():
            self.close(ClosedBy.FRAMEWORK_SKIPPED, None, skipped=True)
        self.round.dirty = True
        self.round.backward_ended = False
        self.layouts.forget_gradients()
        if weights_due(self.round.number):
            self._learn_layouts()
            self.replicas.backward_begins(self.layouts.gradients())

    def backward_ended(self) -> None:
        """Called after a backward returned."""
        self.round.backward_ended = True
        self.round.backwards += 1
        self.layouts.forget_gradients()
        if weights_due(self.round.number):
            self.replicas.backward_ended(self.layouts.gradients())
        self._scan.remember_gradients()

    def start_checked(self, found: Scanned) -> None:
        """Parameters as they were before the first forward."""
        if found.nonfinite:
            self._latch(Phase.INIT, found.found, parameters=found.names, total=found.total)

    def clipped(self, norm: float) -> None:
        """The norm that clipping computed: if it is nonfinite though no gradient is, the whole update is multiplied by zero."""
        if not math.isfinite(norm) and not self.round.gradient_nonfinite and not self._scan.gradients().nonfinite:
            self._latch(Phase.CLIP, scalar_check(norm), value=norm)

    def misused(self, note: str) -> None:
        """A call in a wrong order. Between two rounds it belongs to the one just closed."""
        step = self._steps if self.round.dirty else max(self._steps - 1, 0)
        self._latch(Phase.MISUSE, NO_CHECK, note=note, step=step)

    # --- the clock -----------------------------------------------------------------------------------------------------

    def optimizer_steps(
        self, optimizer: torch.optim.Optimizer, *, skipped: bool = False, scale: float | None = None
    ) -> None:
        """An optimizer (or a GradScaler in its place) is about to step, or has left the step out."""
        self.pending.join()
        if self._first is None:
            self._first = weakref.ref(optimizer)
        if self.round.dirty:
            self._loss_scale = scale
            self.close(ClosedBy.SCALER_SKIP if skipped else ClosedBy.OPTIMIZER, optimizer, skipped=skipped)

    def leaving(self, note: str) -> None:
        """The process ends: an open round with anything in it is closed as it is."""
        if note:
            self._latch(Phase.EXIT, NO_CHECK, note=note)
        if self.round.dirty or self.round.suspicious:
            self.close(ClosedBy.EXIT, None, skipped=False)

    @property
    def last_closed(self) -> int:
        """Number of the last closed round, -1 if none."""
        return self.round.number - 1

    def step_of(self, optimizer: torch.optim.Optimizer | None) -> int:
        """What the user's loop would call this iteration: closed rounds of the first optimizer, or one less in its shadow."""
        first = self._first() if self._first is not None else None
        if optimizer is None or first is None or optimizer is first:
            return self._steps
        return max(self._steps - 1, 0)

    def close(self, by: ClosedBy, optimizer: torch.optim.Optimizer | None, *, skipped: bool) -> None:
        """End the round: look at the state if anything was latched, report, and begin the next."""
        closing, step = self.round, self.step_of(optimizer)
        first = self._first() if self._first is not None else None
        unreduced, weights = self._look_at_replicas(closing)
        params, buffers = self._look_at_state(closing) if closing.suspicious else (None, None)
        self._report(closing, step, by, skipped, (params, buffers), (unreduced, weights))
        if self._worth_keeping(closing, skipped):
            self._on_suspicious(closing, step, by.value)
        if optimizer is None or first is None or optimizer is first:
            self._steps += 1
        self._on_closed(closing.number, step, closing.loss)
        self.round = Round(
            closing.number + 1,
            checked_before=self._checker.count,
            seconds_before=self._me.health.stopwatch.seconds,
        )
        self._loss_scale = None

    def _look_at_replicas(self, closing: Round) -> tuple[list[str], tuple[Weights, ...]]:
        """In some rounds: which gradients nobody reduced, and fingerprints of the weights they will be applied to."""
        if self._me.world_size == 1 or not weights_due(closing.number):
            return [], ()
        unreduced = self.replicas.unreduced()
        wanted = set(unreduced)
        return unreduced, self.replicas.weights((n, p) for n, p in self.layouts.parameters() if n in wanted)

    def _look_at_state(self, closing: Round) -> tuple[bool, bool]:
        """Were parameters or buffers already nonfinite? Also: what do the gradients that will be applied look like?"""
        if closing.derived_nonfinite and not closing.gradient_nonfinite:
            applied = self._scan.gradients()
            if applied.nonfinite:
                self._latch(Phase.APPLIED, applied.found, parameters=applied.names, total=applied.total)
        params = self._scan.parameters()
        if params.nonfinite:
            self._latch(Phase.PARAMS, params.found, parameters=params.names, total=params.total)
        buffers = self._scan.buffers()
        if buffers.nonfinite:
            self._latch(Phase.BUFFERS, buffers.found, parameters=buffers.names, total=buffers.total)
        return params.nonfinite, buffers.nonfinite

    def _worth_keeping(self, closing: Round, skipped: bool) -> bool:
        """A dump is for rounds with a nonfinite loss or gradient, but not for a scaler's ordinary skip (finite loss)."""
        if skipped and self._loss_scale is not None and not closing.loss_nonfinite:
            return False
        return closing.loss_nonfinite or closing.gradient_nonfinite or closing.derived_nonfinite

    def _report(
        self,
        closing: Round,
        step: int,
        by: ClosedBy,
        skipped: bool,
        damaged: tuple[bool | None, bool | None],
        replicas: tuple[list[str], tuple[Weights, ...]],
    ) -> None:
        unreduced, weights = replicas
        self._send(
            RoundClosed(
                attempt=self._me.attempt,
                rank=self._me.rank,
                round=closing.number,
                step=step,
                closed_by=by,
                at=time.time(),
                evidence=closing.evidence,
                checks=self._checker.count - closing.checked_before,
                loss=closing.loss,
                loss_scale=self._loss_scale,
                skipped=skipped,
                params_nonfinite=damaged[0],
                buffers_nonfinite=damaged[1],
                check_seconds=self._me.health.stopwatch.seconds - closing.seconds_before,
                backwards=closing.backwards,
                activations=closing.activations,
                gradient_absmax=closing.gradient_absmax,
                sync=self.replicas.close(),
                unreduced=tuple(unreduced[:MAX_NAMES]),
                unreduced_total=len(unreduced),
                weights=weights,
            )
        )

    def _latch(
        self,
        phase: Phase,
        found: Check,
        reduction: Reduction | None = None,
        *,
        parameters: tuple[str, ...] = (),
        total: int = 0,
        value: float | None = None,
        note: str = "",
        step: int | None = None,
    ) -> None:
        """Send evidence at once and remember that this round has some. Safe from gloo's threads."""
        with self._lock:
            current = self.round
            if reduction is not None and phase in (Phase.WIRE, Phase.REDUCED):
                current.gradient_nonfinite |= reduction.role is Role.GRADIENT
                current.derived_nonfinite |= reduction.role is Role.DERIVED
            if current.evidence >= MAX_EVIDENCE:
                self._me.health.drops["evidence_over_limit"] += 1
                return
            order, current.evidence = current.evidence, current.evidence + 1
        self._send(
            Evidence(
                attempt=self._me.attempt,
                rank=self._me.rank,
                round=current.number,
                step=self._steps if step is None else step,
                order=order,
                phase=phase,
                at=time.time(),
                check=found,
                parameters=reduction.parameters if reduction is not None and phase is Phase.WIRE else parameters,
                parameters_total=reduction.parameters_total if reduction is not None and phase is Phase.WIRE else total,
                collective=_collective(reduction) if reduction is not None else None,
                value=value,
                note=note,
            )
        )


def scalar_check(value: float) -> Check:
    """Check of a one-element tensor holding ``value``."""
    return Check(1, int(math.isnan(value)), int(math.isinf(value)), abs(value) if math.isfinite(value) else 0.0)


def _collective(reduction: Reduction) -> Collective:
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
