"""What this rank saw this round: latched in the hot path, judged once at the round's end.

Owns the clock (which call closes a round, and which step of the user's loop it was) and the sending of evidence. The taps call
it; collectives are ``reductions.py``'s, looking at parameters ``scan.py``'s, writing parts ``evidence.py``'s.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from sentinel.wire.messages import (
    ANOMALY,
    AT_START,
    HANDED,
    WRITTEN,
    Check,
    ClosedBy,
    Evidence,
    Guarded,
    Phase,
    Role,
    RoundClosed,
    Weights,
)
from sentinel.wire.scale import ScaleSearch
from sentinel_agent.check import EMPTY, Checker, scalar_check
from sentinel_agent.clock import Clock
from sentinel_agent.guard import Guard
from sentinel_agent.handover import Handover
from sentinel_agent.identity import Identity
from sentinel_agent.reductions import Reductions, collective_of, note_of
from sentinel_agent.replicas import weights_due
from sentinel_agent.roles import in_backward
from sentinel_agent.rounds import Reduction, Round
from sentinel_agent.scan import MAX_NAMES, Scan, Scanned
from sentinel_agent.state import Damage, State
from sentinel_agent.written import Written

MAX_EVIDENCE = 256
"""Evidence sent per round and rank; one is enough for a verdict, the rest only says how far it spread."""
MAX_ECHOES = 2
"""The same where the round began with parameters that were already nonfinite: whatever is seen follows from that."""
USUAL_ROUNDS, MAX_UNANSWERED = 8, 8
"""Rounds that say how many forwards are usual, and forwards of one round up to which losses are looked for among the callers."""
AVERAGED_EVERY = 16
"""Weights that may just have been averaged are compared once in so many rounds: a loop may exchange something before each."""


class Ledger:
    """The open round of this rank, and the history the clock needs.

    ``send`` queues a report; ``on_suspicious(round, step, closed_by)`` is called at the close of a round that latched something a
    scaler does not explain; ``on_closed(round, step)`` at the close of every round.
    """

    def __init__(
        self,
        identity: Identity,
        checker: Checker,
        scan: Scan,
        send: Callable[[Any], None],
        on_suspicious: Callable[[Round, int, str], None],
        on_closed: Callable[[Round, int], None],
        guard: Guard,
    ) -> None:
        self._me = identity
        self._checker = checker
        self._scan = scan
        self._state = State(scan)
        self.written = Written()
        self._send = send
        self._on_suspicious = on_suspicious
        self._on_closed = on_closed
        self.round = Round(0)
        self.reductions = Reductions(identity, checker, scan, self, guard)
        self.guard = guard
        self.layouts, self.replicas = self.reductions.layouts, self.reductions.replicas
        self.pending = self.reductions.pending
        self.handover = Handover(scan, self, self.pending, self.layouts.gradients)
        self.clock = Clock()
        self._search = ScaleSearch()
        self._syncs, self._shadowed = 1, 0
        self._last_loss_nonfinite = False
        self._misuses: set[str] = set()
        self._forwards: deque[int] = deque(maxlen=USUAL_ROUNDS)  # of the last rounds that had any
        self._weighed_at = -AVERAGED_EVERY  # the last round in which weights were compared for having been averaged
        self._lock = threading.Lock()

    # --- losses, forwards, backwards -----------------------------------------------------------------------------------

    def loss(self, value: float) -> None:
        """The value that backward is called on, unscaled."""
        self.round.loss = value
        if not math.isfinite(value):
            self.round.loss_nonfinite = True
            self.latch(Phase.LOSS, scalar_check(value), value=value)

    def anomaly(self, operator: str) -> None:
        """Torch's anomaly mode ended this round's backward, in which ``operator`` made NaN. How much of it, it does not say."""
        self.latch(Phase.RAW, Check(1, 1, 0, 0.0), note=f"{ANOMALY}{operator}")

    def loss_left_behind(self, value: float) -> bool:
        """A nonfinite loss found in a frame that is being left. If a backward saw it, it was told then (False)."""
        if self.round.loss_nonfinite or self._last_loss_nonfinite:
            return False
        self.loss(value)
        return True

    def value_left_behind(self, found: Check, where: str) -> bool:
        """A forward that no backward followed died with NaN in what it had computed; False if that is an old story."""
        if self.round.loss_nonfinite or self._last_loss_nonfinite or not self.round.forwards or self.round.dirty:
            return False
        self.round.loss_nonfinite = True
        self.latch(Phase.OUTPUT, found, note=where)
        return True

    @property
    def unanswered(self) -> bool:
        """Has this round had more forwards than the last ones, and no backward? Then its losses may have been passed over."""
        current, usual = self.round, max(self._forwards, default=MAX_UNANSWERED)
        return usual <= current.forwards < MAX_UNANSWERED and not current.backwards and not in_backward()

    @property
    def since(self) -> int:
        """Autograd's number from which a node belongs to the open round; where forwards are heard, none does before its first."""
        return self.round.first_node if self.round.forwards or not self._forwards else sys.maxsize

    def backward_begins(self) -> None:
        """Called before a backward: if the last round's gradients were cleared with no step, that round is over."""
        if self.round.backward_ended and self.clock.may_be_over and self._scan.cleared():
            self.pending.join()
            self.close(ClosedBy.FRAMEWORK_SKIPPED, self._scan.owner(), skipped=True)
        self.guard.backward_begins()
        self.round.dirty = True
        self.round.reducing = False
        self.round.backward_ended = self.round.between = self.round.looked = False
        self.round.backward_thread = threading.get_ident()
        self.layouts.forget_gradients()
        if self._weights_due(self.round):
            self.reductions.learn_layouts(unfrozen=True)
            self.replicas.backward_begins(self.layouts.gradients())

    def backward_ended(self) -> None:
        """Called after a backward returned."""
        self.round.backward_ended = self.round.between = True
        self.round.backward_thread = 0
        self.round.backwards += 1
        self.round.syncs += self.round.reducing
        self.clock.backward_ended()
        self.replicas.look_at_gradients(self.round.number, in_hook=True)
        self.layouts.forget_gradients()
        if self._weights_due(self.round):
            self.replicas.backward_ended(self.layouts.gradients())
        self._scan.remember_gradients()
        self.reductions.backward_ended()

    def start_checked(self, found: Scanned) -> None:
        """Parameters as they were before the first forward."""
        if found.nonfinite:
            note = HANDED if self.reductions.moves.were_handed(found.found) else ""
            self.latch(Phase.INIT, found.found, parameters=found.names, total=found.total, note=note)

    def overflowed(self, found: Check, note: str) -> None:
        """An intermediate of this round's forward overflowed; whether it was absorbed, the round will show."""
        self.latch(Phase.AUDIT, found, note=note)

    def misused(self, note: str) -> None:
        """A call in a wrong order; each kind is told once. Between two rounds it belongs to the one just closed."""
        if note in self._misuses:
            return
        self._misuses.add(note)
        step = self.clock.step if self.round.dirty else max(self.clock.step - 1, 0)
        self.latch(Phase.MISUSE, EMPTY, note=note, step=step)

    # --- the clock -----------------------------------------------------------------------------------------------------

    def optimizer_steps(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        skipped: bool = False,
        scale: float | None = None,
        again: bool = False,
    ) -> Guarded:
        """An optimizer (or a GradScaler in its place) is about to step, or has left the step out. Returns the guard's decision.

        ``again``: its closure was evaluated once more within the same step. A step with no backward before it closes a round
        only if the optimizer leads and its gradients are new: a loop may have put them there by hand.
        """
        wrote = self.handover.stepping(optimizer)
        if self.round.dirty or (wrote and self.clock.leads(optimizer)):
            self.round.loss_scale = scale
            by = ClosedBy.SCALER_SKIP if skipped else ClosedBy.OPTIMIZER
            self.guard.judge(self.round, in_backward=in_backward(), scaler_skips=skipped)
            self.close(by, optimizer, skipped=skipped, again=again)
        return self.guard.decision

    def shadowed(self) -> None:
        """No input is left and one backward of the others was matched: a round has as many of them as this rank's own last one."""
        self.pending.join()
        self._shadowed += 1
        if self._shadowed >= self._syncs:
            self._shadowed = 0
            self.close(ClosedBy.JOINED, None, skipped=False, again=True)

    def leaving(self, note: str) -> None:
        """The process ends: an open round with anything in it is closed as it is."""
        if note:
            self.latch(Phase.EXIT, EMPTY, note=note)
        if self.round.dirty or self.round.suspicious:
            self.close(ClosedBy.EXIT, None, skipped=False)

    @property
    def last_closed(self) -> int:
        """Number of the last closed round, -1 if none."""
        return self.round.number - 1

    def close(
        self, by: ClosedBy, optimizer: torch.optim.Optimizer | None, *, skipped: bool, again: bool = False
    ) -> None:
        """End the round: look at the state if anything was latched, report, and begin the next."""
        if by is not ClosedBy.JOINED:
            self.handover.look_at_own()
        closing, step = self.round, self.clock.step_of(optimizer, again=again)
        if by is ClosedBy.OPTIMIZER:
            self.replicas.look_at_gradients(closing.number, in_hook=False)
        unreduced, weights = ([], ()) if by is ClosedBy.JOINED else self._look_at_replicas(closing)
        damage = self._look_at_state(closing)
        self._report(closing, step, by, skipped, damage, (unreduced, weights))
        if self._worth_keeping(closing, skipped):
            self._on_suspicious(closing, step, by.value)
        self.clock.closed(optimizer, again=again)
        if self._just_averaged(closing) and closing.backwards:
            self._weighed_at = closing.number
        if closing.forwards and not closing.loss_nonfinite:
            self._forwards.append(closing.forwards)
        self._search.closed(closing.loss_scale, skipped=skipped)
        self._syncs = self._syncs if by is ClosedBy.JOINED else max(closing.syncs, 1)
        self._last_loss_nonfinite = closing.loss_nonfinite
        self._on_closed(closing, step)
        self.round = Round(
            closing.number + 1,
            checked_before=self._checker.count,
            seconds_before=self._me.health.stopwatch.seconds,
            echoes=damage.parameters,
            averaged=closing.synced and closing.backwards == 0,
        )

    def _weights_due(self, round_: Round) -> bool:
        """Are weights compared in this round? Those of a very small model in every one, and of local SGD when it has averaged."""
        return weights_due(round_.number) or self.layouts.small or self._just_averaged(round_)

    def _just_averaged(self, round_: Round) -> bool:
        return round_.averaged and round_.number - self._weighed_at >= AVERAGED_EVERY

    def _look_at_replicas(self, closing: Round) -> tuple[list[str], tuple[Weights, ...]]:
        """In some rounds: which gradients nobody reduced, and fingerprints of the weights they will be applied to."""
        if self._me.world_size == 1 or not self._weights_due(closing):
            return [], ()
        unreduced = self.replicas.unreduced()
        wanted = set(unreduced)
        return unreduced, self.replicas.weights((n, p) for n, p in self.layouts.parameters() if n in wanted)

    def _look_at_state(self, closing: Round) -> Damage:
        """Were parameters or buffers already nonfinite? And which gradients would be applied, if any of them is?"""
        if closing.derived_nonfinite or closing.gradient_nonfinite:
            applied = self._scan.gradients()
            if applied.nonfinite:
                self.latch(Phase.APPLIED, applied.found, parameters=applied.names, total=applied.total)
        started = self._scan.buffers_at_start
        spoilt = closing.loss_nonfinite or (closing.gradient_nonfinite and closing.loss_scale is None)
        if closing.number == 0 and started.nonfinite and spoilt:
            note = HANDED if self.reductions.moves.were_handed(started.found) else AT_START
            self.latch(Phase.BUFFERS, started.found, parameters=started.names, total=started.total, note=note)
        damage = self._state.look(suspicious=closing.suspicious)
        if damage.parameter_news is not None:
            self._tell_parameters(damage.parameter_news)
        else:
            self.written.round_closes(p for _, p in self.layouts.parameters())
        if damage.buffer_news is not None:
            news = damage.buffer_news
            self.latch(Phase.BUFFERS, news.found, parameters=news.names, total=news.total)
        return damage

    def _tell_parameters(self, news: Scanned) -> None:
        """Parameters were found nonfinite: did the last step leave them so, or has somebody else written them since?"""
        names = set(news.names)
        written = self.written.since_the_step(p for name, p in self._scan.naming.parameters() if name in names)
        note = WRITTEN if written else ""
        self.latch(Phase.PARAMS, news.found, parameters=news.names, total=news.total, note=note)

    def _worth_keeping(self, closing: Round, skipped: bool) -> bool:
        """A dump is for rounds with a nonfinite loss or gradient, but not for a scaler's ordinary skip.

        With a finite loss, a skip is not ordinary if no scale explains it: NaN with no infinity, outside of the search for a scale.
        """
        if skipped and closing.loss_scale is not None and not closing.loss_nonfinite:
            return closing.gradient_nonfinite and not closing.infinite and not self._search.explains(closing.loss_scale)
        if closing.shared_nonfinite or closing.spoilt:
            return True
        return closing.loss_nonfinite or closing.gradient_nonfinite or closing.derived_nonfinite

    def _report(
        self,
        closing: Round,
        step: int,
        by: ClosedBy,
        skipped: bool,
        damage: Damage,
        replicas: tuple[list[str], tuple[Weights, ...]],
    ) -> None:
        unreduced, weights = replicas
        growth = self.reductions.norms.close(closing.number, closing.loss_scale, self.replicas.norm())
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
                loss_scale=closing.loss_scale,
                skipped=skipped,
                params_nonfinite=damage.parameters,
                buffers_nonfinite=damage.buffers,
                check_seconds=self._me.health.stopwatch.seconds - closing.seconds_before,
                backwards=closing.backwards,
                forwards=closing.forwards,
                activations=closing.activations,
                gradient_absmax=closing.gradient_absmax,
                sync=self.replicas.close(),
                unreduced=tuple(unreduced[:MAX_NAMES]),
                unreduced_total=len(unreduced),
                weights=weights,
                guarded=self.guard.decision if by is ClosedBy.OPTIMIZER else Guarded.NO,
                float16_absmax=closing.float16_absmax,
                layer=growth.layer if growth is not None else "",
                layer_growth=growth.factor if growth is not None else None,
            )
        )

    def latch(
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
        gradient = reduction is not None and reduction.role in (Role.GRADIENT, Role.DERIVED)
        if gradient or phase in (Phase.LOSS, Phase.RAW, Phase.PARAMS, Phase.BUFFERS):
            self.reductions.moves.tell()
        with self._lock:
            current = self.round
            current.suspect |= phase not in (Phase.REDUCED, Phase.APPLIED, Phase.CLIP, Phase.EXIT)
            if phase is Phase.RAW:
                current.infinite |= found.inf > 0
                current.gradient_nonfinite = True
            if reduction is not None and phase in (Phase.WIRE, Phase.REDUCED):
                current.infinite |= found.inf > 0 or (reduction.raw is not None and reduction.raw.inf > 0)
                current.gradient_nonfinite |= reduction.role is Role.GRADIENT
                current.derived_nonfinite |= reduction.role is Role.DERIVED
            if current.evidence >= (MAX_ECHOES if current.echoes else MAX_EVIDENCE):
                if not current.echoes:
                    self._me.health.drops["evidence_over_limit"] += 1
                return
            order, current.evidence = current.evidence, current.evidence + 1
        self._send(
            Evidence(
                attempt=self._me.attempt,
                rank=self._me.rank,
                round=current.number,
                step=self.clock.step if step is None else step,
                order=order,
                phase=phase,
                at=time.time(),
                check=found,
                parameters=reduction.parameters if reduction is not None and phase is Phase.WIRE else parameters,
                parameters_total=reduction.parameters_total if reduction is not None and phase is Phase.WIRE else total,
                collective=collective_of(reduction) if reduction is not None else None,
                value=value,
                note=note_of(phase, reduction) if reduction is not None else note,
            )
        )
