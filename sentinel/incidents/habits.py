"""What decides about habits that no value betrays yet: wrong use, clipping that stops the training, overflow that is absorbed.

Owns rules 17 and 18 and the clipping half of rule 16. The agent sees them; here they become one finding per habit and attempt.
"""

from __future__ import annotations

from collections.abc import Iterator

from sentinel.incidents.describe import findings, parameters_of, rank_list
from sentinel.incidents.finding import Finding, attribution_of
from sentinel.incidents.history import History
from sentinel.incidents.model import Cause, Kind, Severity, Stage, Verdict
from sentinel.incidents.verdicts import names_of
from sentinel.incidents.window import RoundWindow
from sentinel.wire.messages import SECOND_MOMENT, Evidence, Phase

REASONS = {
    "clip_before_unscale": "gradients were clipped while still multiplied by the loss scale: "
    "the threshold applied to scaled values",
    "step_without_unscale": "the optimizer stepped on gradients still multiplied by the loss scale",
    "scale_changed_before_step": "the scale changed (scaler.update) between the backward and this optimizer's step: "
    "its gradients are divided by another scale than they were multiplied by",
    "scaler_with_bfloat16": "a GradScaler scales a loss under bfloat16 autocast, which has float32's range and needs none",
    "used_under_way": "gradients were clipped or applied while their all-reduce was still under way: nobody had waited for it "
    "(Sentinel's checks do before the step, so that a run without them may go wrong where this one did not)",
}
"""Note of a MISUSE evidence -> what is wrong, in words."""


def judge(window: RoundWindow, history: History) -> Iterator[Finding]:
    """Findings of this round's CLIP and MISUSE evidence; each habit is told once."""
    for note in dict.fromkeys(e.note for e in window.of_phase(Phase.MISUSE)):
        if note not in history.told:
            history.told.add(note)
            seen = [e for e in window.of_phase(Phase.MISUSE) if e.note == note]
            cause = Cause.COMMUNICATION if note.endswith("under_way") else Cause.OPTIMIZATION
            yield _finding(window, note, Kind.MISUSE, seen, REASONS.get(note, note), cause=cause)
    yield from _absorbed(window, history)
    yield from _squared(window, history)
    clipped = [e for e in window.of_phase(Phase.CLIP) if e.note != SECOND_MOMENT]
    if clipped and not window.gradient_evidence():
        history.told.add("norm_overflow")
        yield _finding(
            window,
            "norm_overflow",
            Kind.STALLED_TRAINING,
            clipped,
            f"the gradient norm of {rank_list(sorted({e.rank for e in clipped}))} overflowed to {clipped[0].value} though every "
            "gradient was finite: clipping multiplies the whole update by zero",
        )


def _squared(window: RoundWindow, history: History) -> Iterator[Finding]:
    """Rule 16, by an optimizer: the square of finite gradients overflowed, and dividing by it moves nothing, from here on."""
    seen = [e for e in window.of_phase(Phase.CLIP) if e.note == SECOND_MOMENT]
    if not seen or "norm_overflow" in history.told:
        return
    history.told.add("norm_overflow")
    yield _finding(
        window,
        "second_moment_overflow",
        Kind.STALLED_TRAINING,
        seen,
        f"gradients of {rank_list(sorted({e.rank for e in seen}))} were finite, but so large that their squares overflowed to "
        f"inf in the optimizer's state ({names_of(seen)}): it divides by their root, and those weights cannot move any more",
    )


def _absorbed(window: RoundWindow, history: History) -> Iterator[Finding]:
    """Rule 17: an intermediate overflowed, and neither loss nor gradients show it."""
    seen = window.of_phase(Phase.AUDIT)
    if not seen or window.has_nonfinite or "silent_overflow" in history.told:
        return
    history.told.add("silent_overflow")
    what, _, before = seen[0].note.partition("; ")
    yield _finding(
        window,
        "silent_overflow",
        Kind.SILENT_OVERFLOW,
        seen,
        f"{what} on {rank_list(sorted({e.rank for e in seen}))} ({seen[0].check.inf} of {seen[0].check.numel} elements), "
        "and it was absorbed: loss and gradients are finite" + (f"; {before}" if before else ""),
        stage=Stage.FORWARD,
        cause=Cause.NUMERICS,
    )


def _finding(
    window: RoundWindow,
    rule: str,
    kind: Kind,
    seen: list[Evidence],
    reason: str,
    *,
    stage: Stage = Stage.OPTIMIZER,
    cause: Cause = Cause.OPTIMIZATION,
) -> Finding:
    ranks = tuple(sorted({e.rank for e in seen}))
    verdict = Verdict(
        rule=rule,
        kind=kind,
        stage=stage,
        attribution=attribution_of(ranks, tuple(window.closed)),
        suspect_ranks=ranks,
        severity=Severity.WARNING,
        cause=cause,
        reason=reason,
        parameters=parameters_of(seen),
        findings=findings(window, ranks),
    )
    step = min(e.step for e in seen)
    return Finding(verdict, window.round if step >= window.step(ranks) else max(window.round - 1, 0), step)
