"""What decides about steps: ranks that disagree on stepping, scalers that only skip, gradients that are zero.

Owns rules 14, 15 and most of 16 (``habits.py`` has the rest). Rules compare a round with the rounds before it.
"""

from __future__ import annotations

from collections.abc import Iterator

from sentinel.incidents.describe import plural, rank_list
from sentinel.incidents.finding import Finding, attribution_of, finding, minority
from sentinel.incidents.history import History, Streak
from sentinel.incidents.model import Cause, Kind, Severity, Stage, Verdict
from sentinel.incidents.replicas import weights_of
from sentinel.incidents.scaler import MAX_CONSECUTIVE_SKIPS
from sentinel.incidents.window import RoundWindow
from sentinel.wire.messages import UNREDUCED, ClosedBy, Guarded, RoundClosed

ZERO_ROUNDS = 3
"""Gradients that are exactly zero on all ranks from the first round on are told after this many rounds."""
ZERO_ROUNDS_LATER = 50
"""Later in a run, zero gradients may be what the data says for a while (equal rewards, nothing to learn)."""
UNMOVED_ROUNDS = 32
"""Steps from the training's first on that change no weight are told after so many: a warm-up begins with rates near zero."""
UNMOVED_AT_END = 4
"""The same where the run is over."""
SCALE_FLOOR = 1.0
"""A scaler that has to go below this cannot represent even the unscaled gradients."""


def disagreement(window: RoundWindow, _history: History) -> Iterator[Finding]:
    """Rule 14: some ranks stepped, others did not."""
    stepped = {r: c.closed_by is ClosedBy.OPTIMIZER and not c.skipped for r, c in window.closed.items()}
    if any(c.closed_by is ClosedBy.EXIT for c in window.closed.values()) or len(set(stepped.values())) < 2:
        return
    if not any(sync.size > 1 for c in window.closed.values() for sync in c.sync):
        return  # ranks that reduce nothing together may step as they like
    suspects = minority(stepped)
    skipped = sorted(r for r, did in stepped.items() if not did)
    yield finding(
        window,
        "step_disagreement",
        Kind.STEP_DISAGREEMENT,
        Stage.OPTIMIZER,
        suspects,
        tuple(stepped),
        Cause.COMMUNICATION,
        f"{rank_list(skipped)} left the optimizer step out, the other ranks made it: their weights differ from here on",
    )


def scaler_collapse(window: RoundWindow, history: History) -> Iterator[Finding]:
    """Rule 15: the loss scale collapsed, or the scaler skips round after round."""
    closed = window.closed[min(window.closed)]
    if closed.loss_scale is None or not closed.skipped:
        history.skips.ends()
        return
    history.skips.goes_on(closed, tuple(sorted(window.closed)))
    collapsed = closed.loss_scale < SCALE_FLOOR and history.skips.length >= ZERO_ROUNDS
    if history.skips.told or not (collapsed or history.skips.length >= MAX_CONSECUTIVE_SKIPS):
        return
    history.skips.told = True
    ranks = tuple(sorted(window.closed))
    yield finding(
        window,
        "scaler_collapse",
        Kind.SCALER_COLLAPSE,
        Stage.PRE_REDUCE,
        ranks,
        ranks,
        Cause.NUMERICS,
        f"the GradScaler has skipped {history.skips.length} rounds in a row and its scale is down to {closed.loss_scale:.4g}: "
        "no scale makes these gradients finite",
        at=(history.skips.round, history.skips.step),
    )


def zeros(window: RoundWindow, history: History) -> Iterator[Finding]:
    """Rule 16: the gradients of every rank are exactly zero."""
    largest = [c.gradient_absmax for c in window.closed.values()]
    if window.has_evidence or any(one is None or one > 0.0 for one in largest):
        history.zero_gradients.ends()
        return
    streak = history.zero_gradients
    streak.goes_on(window.closed[min(window.closed)], tuple(sorted(window.closed)))
    enough = ZERO_ROUNDS if streak.round == 0 else ZERO_ROUNDS_LATER
    if streak.length >= enough and not streak.told:
        streak.told = True
        yield _zero_gradients(streak)


def unmoved(window: RoundWindow, history: History) -> Iterator[Finding]:
    """Rule 16, third form: step after step, and no weight of any rank has changed by a bit since the training began."""
    if history.moved:
        return
    seen = {(g, r): f for g, prints in weights_of(window).items() if g != UNREDUCED for r, f in prints.items()}
    history.moved = any(history.first_weights.get(key, seen[key]) != seen[key] for key in seen)
    if not seen.keys() <= history.first_weights.keys():
        history.first_weights |= seen
        history.applied = 0  # what was done to others before says nothing of these
    if seen:
        history.in_vain, history.in_vain_ranks = history.applied, tuple(sorted(window.closed))
    history.applied += all(_applied(closed) for closed in window.closed.values())
    if history.in_vain >= UNMOVED_ROUNDS:
        yield from unmoved_weights(history)


def _applied(closed: RoundClosed) -> bool:
    made = closed.closed_by is ClosedBy.OPTIMIZER and not closed.skipped and closed.guarded is Guarded.NO
    return made and bool(closed.gradient_absmax)


def unmoved_weights(history: History) -> Iterator[Finding]:
    """What is told of weights that have not moved so far, once; nothing if another stall explains it, or they were hardly tried."""
    told = {"norm_overflow", "unmoved_weights"} & history.told
    if history.moved or told or history.in_vain < UNMOVED_AT_END:
        return
    history.told.add("unmoved_weights")
    ranks = history.in_vain_ranks
    verdict = Verdict(
        rule="unmoved_weights",
        kind=Kind.STALLED_TRAINING,
        stage=Stage.OPTIMIZER,
        attribution=attribution_of(ranks, ranks),
        suspect_ranks=ranks,
        severity=Severity.WARNING,
        cause=Cause.NUMERICS,
        reason=f"{plural(history.in_vain, 'step')} with gradients that are not zero have not changed one bit of any weight: "
        "updates smaller than half the spacing of the weights' dtype (bfloat16, float16) are rounded away, or the rate is zero",
    )
    yield Finding(verdict, 0, 0)


def _zero_gradients(streak: Streak) -> Finding:
    ranks = streak.ranks
    verdict = Verdict(
        rule="zero_gradients",
        kind=Kind.STALLED_TRAINING,
        stage=Stage.PRE_REDUCE,
        attribution=attribution_of(ranks, ranks),
        suspect_ranks=ranks,
        severity=Severity.WARNING,
        cause=Cause.NUMERICS,
        reason=f"every gradient of every rank has been exactly zero for {plural(streak.length, 'round')}: "
        "underflow in half precision without a loss scale, or a loss that does not depend on the parameters",
    )
    return Finding(verdict, streak.round, streak.step)
