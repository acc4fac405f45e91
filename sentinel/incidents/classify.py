"""What decides: an ordered list of rules; the first that matches gives the verdict, with a reason in words.

Owns the rules of DESIGN.md section 3 for one round. Pure: a view of the round in, a verdict (or a named reason for none) out.
Incidents, echoes and deadlines are ``tracker.py``'s.

Parameters and buffers (2, 12, 13) are ``state.py``'s, finite failures (9-11, 14-16) ``comparisons.py``'s, wrong use and the audit
(17, 18) ``habits.py``'s, silent ranks (19) ``silence.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from sentinel.incidents import blame, state
from sentinel.incidents.describe import loss_words, rank_list
from sentinel.incidents.finding import attribution_of
from sentinel.incidents.model import Attribution, Cause, Kind, Severity, Stage, Verdict
from sentinel.incidents.scaler import MAX_CONSECUTIVE_SKIPS
from sentinel.incidents.verdicts import group_of, names_of, ranks_of, verdict_on, when_seen
from sentinel.incidents.view import View
from sentinel.wire.messages import ANOMALY, CHAINED, REWRITTEN, ClosedBy, Collective, Evidence, Phase, Role


class Quiet(StrEnum):
    """Why a round with evidence raises no incident."""

    SCALER_SEARCH = "scaler_search"  # rule 1: ordinary skip of the GradScaler
    SCALER_COLLAPSED = "scaler_collapsed"  # one more skip of a scaler whose collapse rule 15 tells
    NOTHING_CONFIRMED = "nothing_confirmed"  # only values that reached no gradient, loss or parameter


Outcome = Verdict | Quiet
Rule = Callable[[View], Outcome | None]


def classify(view: View) -> Outcome:
    """The first matching rule's outcome."""
    for rule in RULES:
        outcome = rule(view)
        if outcome is not None:
            return outcome
    return Quiet.NOTHING_CONFIRMED


def scaler_search(view: View) -> Outcome | None:
    """Rule 1: the GradScaler skipped nonfinite *scaled* gradients, the loss itself finite, as its search for a scale explains.

    Outside a search an occasional skip is ordinary too if some value overflowed to inf; NaN with no inf anywhere is not what
    too large a scale makes.
    """
    closed = view.window.closed.values()
    scale = next((c.loss_scale for c in closed if c.loss_scale is not None), None)
    if scale is None or not any(c.skipped for c in closed):
        return None
    if view.window.of_phase(Phase.LOSS, Phase.INIT, Phase.PARAMS, Phase.BUFFERS):
        return None
    if view.scaler.consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
        return Quiet.SCALER_COLLAPSED
    overflowed = any(e.check.inf for e in view.window.gradient_evidence())
    return Quiet.SCALER_SEARCH if overflowed or view.scaler.explains(scale) else None


def raw_gradient(view: View) -> Outcome | None:
    """Rule 3: autograd's own gradients were nonfinite on some ranks, before any reduction."""
    origins = blame.raw_origins(view.window)
    if not origins:
        return None
    seen = [e for e in view.window.gradient_evidence() if e.rank in origins and blame.raw_is_nonfinite(e)]
    loss_ranks = set(view.window.ranks_of(Phase.LOSS))
    lost = [rank for rank in origins if rank in loss_ranks]
    spoilt = blame.raw_nonfinite_ranks(view.window)
    others = [r for r in group_of(view, seen) if r not in spoilt]
    received = [r for r in spoilt if r not in origins]
    handed = f"; {rank_list(received)} got theirs by what ranks hand each other besides gradients" if received else ""
    ended = any(e.note.startswith(ANOMALY) for e in seen)  # then nobody's gradients were reduced
    finite = others and not view.missing and not ended
    innocent = f"; {rank_list(others)} contributed finite gradients" if finite else ""
    loss = _loss_of(origins, lost)
    if not lost and all(one.loss is None for rank, one in view.window.closed.items() if rank in origins):
        loss = ""  # a stage of a pipeline that computes none
    return verdict_on(
        view,
        "raw_gradient",
        Kind.NONFINITE_GRADIENT,
        Stage.PRE_REDUCE,
        seen,
        _cause_of_raw(view, origins, bool(lost)),
        f"gradients of {rank_list(origins)} were nonfinite {when_seen(seen)} ({names_of(seen)}){loss}{handed}{innocent}",
    )


def _loss_of(origins: tuple[int, ...], lost: list[int]) -> str:
    several = len(origins) > 1
    if not lost:
        return f", though {'their losses were' if several else 'its loss was'} finite"
    return f", {'losses were' if several else 'its loss was'} nonfinite too ({rank_list(lost)})"


def activation_reduction(view: View) -> Outcome | None:
    """Rule 3, tensor-parallel form: every nonfinite gradient came out of one activation reduction that was fed finite values."""
    seen = blame.first_reduced(view.window, Role.ACTIVATION)
    if seen is None or not blame.raw_nonfinite_ranks(view.window) or blame.raw_origins(view.window):
        return None
    gave = blame.gave_nonfinite(view.window, seen)
    if gave:
        return _given_to_activation(view, seen, gave)
    unknown = tuple(rank for rank in view.group_of(seen) if rank in view.missing)
    if unknown:
        return _incomplete(view, seen, unknown)
    return verdict_on(
        view,
        "activation_reduction",
        Kind.NONFINITE_GRADIENT,
        Stage.POST_REDUCE,
        [seen],
        Cause.COMMUNICATION,
        f"an activation {_name_of(seen)} returned nonfinite values for finite inputs, and the gradients followed",
        attribution=Attribution.REDUCTION_INDUCED,
        suspects=(),
    )


def _given_to_activation(view: View, seen: Evidence, gave: tuple[int, ...]) -> Verdict:
    return verdict_on(
        view,
        "given_to_activation",
        Kind.NONFINITE_GRADIENT,
        Stage.PRE_REDUCE,
        [e for e in view.window.of_phase(Phase.WIRE) if e.rank in gave],
        Cause.DATA if len(gave) < len(view.world) else _shared_cause(view),
        f"{rank_list(gave)} gave nonfinite activations to {_name_of(seen)}, and every gradient after it followed",
        suspects=gave,
    )


def loss_only(view: View) -> Outcome | None:
    """Rule 4: the loss was nonfinite, the gradients were not."""
    seen = view.losses
    if not seen or _confirmed_gradients(view):
        return None
    where = "no backward followed" if _no_backward(view) else "every gradient stayed finite"
    words = loss_words(seen, ranks_of(seen), where)
    origins = blame.loss_origins(view.window) or ranks_of(seen)
    if origins != ranks_of(seen):
        words += f"; what {rank_list(origins)} gave to the others was nonfinite"
    return verdict_on(
        view,
        "loss_only",
        Kind.NONFINITE_LOSS,
        Stage.FORWARD,
        seen,
        Cause.DATA if len(origins) < len(view.world) else _shared_cause(view),
        words,
        severity=Severity.WARNING,
        suspects=origins,
    )


def wire_value(view: View) -> Outcome | None:
    """Rules 5 and 6: gradients finite, but what the collective was given was not: a cast or a step between two collectives."""
    seen = blame.wire_origins(view.window)
    if not seen or not _confirmed_gradients(view):
        return None
    first, named = seen[0].collective, [e for e in seen if e.parameters] or view.window.of_phase(Phase.APPLIED)
    later = first is not None and (first.role is Role.DERIVED or seen[0].note == CHAINED)
    between = later and first is not None and not first.narrowed and first.index > 0
    made = (
        "between two collectives of the same reduction, from finite results of the first" if between else _cast(first)
    )
    return verdict_on(
        view,
        "between_collectives" if between else "wire_cast",
        Kind.NONFINITE_GRADIENT,
        Stage.BETWEEN_COLLECTIVES if between else Stage.WIRE_CAST,
        seen,
        Cause.COMMUNICATION,
        f"gradients of {rank_list(ranks_of(seen))} were finite, but became nonfinite {made} ({names_of(named)})",
    )


def reduced_value(view: View) -> Outcome | None:
    """Rules 7 and 8: every rank gave the collective finite values and it returned nonfinite ones."""
    first = blame.first_reduced(view.window)
    if first is None or first.collective is None or not _confirmed_gradients(view):
        return None
    group, results = view.group_of(first), blame.same_collective(view.window, first)
    unknown = tuple(rank for rank in group if rank in view.missing)
    if unknown:
        return _incomplete(view, first, unknown)
    overflow, bound = blame.sum_may_overflow(results, len(group), first.collective.dtype)
    if overflow:
        return _sum_overflow(view, results, bound)
    return _damaged_reduction(view, results, bound)


def _sum_overflow(view: View, results: list[Evidence], bound: float) -> Verdict:
    dtype = _dtype(results)
    return verdict_on(
        view,
        "sum_overflow",
        Kind.NONFINITE_GRADIENT,
        Stage.POST_REDUCE,
        results,
        Cause.COMMUNICATION,
        f"every rank gave {_name_of(results[0])} finite {dtype} gradients; their sum can reach {bound:.4g}, "
        f"beyond {dtype}'s {blame.FINITE_MAX[dtype]:.5g}",
        attribution=Attribution.REDUCTION_INDUCED,
        suspects=(),
    )


def _damaged_reduction(view: View, results: list[Evidence], bound: float) -> Verdict:
    group = view.group_of(results[0])
    scattered = results[0].collective is not None and "scatter" in results[0].collective.op
    # of a reduce-scatter only owners see a result, and the others' inputs are not known: that accuses nobody
    differing = ranks_of(results) if len(ranks_of(results)) < len(group) and not scattered else ()
    return verdict_on(
        view,
        "damaged_reduction",
        Kind.BAD_REDUCTION,
        Stage.POST_REDUCE,
        results,
        Cause.COMMUNICATION,
        f"every rank gave {_name_of(results[0])} finite values whose sum cannot exceed {bound:.4g}, "
        f"yet the result is nonfinite on {rank_list(ranks_of(results))}",
        attribution=attribution_of(differing, group) if differing else Attribution.REDUCTION_INDUCED,
        suspects=differing,
    )


def _incomplete(view: View, first: Evidence, unknown: tuple[int, ...]) -> Verdict:
    return verdict_on(
        view,
        "reduced_incomplete",
        Kind.NONFINITE_GRADIENT,
        Stage.POST_REDUCE,
        [first],
        Cause.UNKNOWN,
        f"incomplete: {_name_of(first)} returned nonfinite gradients, but the reports of {rank_list(unknown)} are missing, "
        "so whose they were cannot be told",
        attribution=Attribution.NONE,
        suspects=(),
    )


def rewritten_gradient(view: View) -> Outcome | None:
    """Gradients were finite when they were reduced, and nonfinite when about to be applied: the script wrote them in between."""
    seen = [e for e in view.window.of_phase(Phase.APPLIED) if e.note == REWRITTEN]
    if not seen or view.window.gradient_evidence():
        return None
    return verdict_on(
        view,
        "rewritten_gradient",
        Kind.NONFINITE_GRADIENT,
        Stage.POST_REDUCE,
        seen,
        _shared_cause(view),
        f"gradients of {rank_list(ranks_of(seen))} were reduced to finite values, and nonfinite when they were to be applied "
        f"({names_of(seen)}): the script has written them in between",
    )


RULES: tuple[Rule, ...] = (
    scaler_search,
    state.parameters_at_start,
    state.buffers_at_start,
    state.parameters_written,
    state.parameters_after_step,
    raw_gradient,
    activation_reduction,
    wire_value,
    reduced_value,
    rewritten_gradient,
    loss_only,
    state.buffers,
)


def _cause_of_raw(view: View, origins: tuple[int, ...], loss_nonfinite: bool) -> Cause:
    """Best first reading: one rank's loss alone points at its batch, all ranks at once at the arithmetic they share."""
    alone = len(origins) < len(view.world)
    if alone:
        return Cause.DATA if loss_nonfinite else Cause.NUMERICS
    return _shared_cause(view)


def _shared_cause(view: View) -> Cause:
    """All ranks at once: a loss that had been growing out of bounds points at the optimization, else at the arithmetic."""
    return Cause.OPTIMIZATION if view.losses_grew else Cause.NUMERICS


def _confirmed_gradients(view: View) -> bool:
    """Derived values count only if the gradients that were applied are nonfinite; real gradients always do."""
    found = view.window.gradient_evidence()
    if any(e.collective is None or e.collective.role is Role.GRADIENT for e in found):
        return True
    return bool(found) and bool(view.window.of_phase(Phase.APPLIED))


def _no_backward(view: View) -> bool:
    return any(c.closed_by is ClosedBy.EXIT for c in view.window.closed.values())


def _cast(first: Collective | None) -> str:
    if first is None or first.narrowed:
        return f"by the cast to {first.dtype if first else '?'} or the compression before the collective"
    return "between the backward and the collective: the script, or a communication hook, has changed them"


def _name_of(seen: Evidence) -> str:
    one = seen.collective
    return f"{one.op.rstrip('_')}({one.reduce_op}) #{one.index}" if one else "the reduction"


def _dtype(results: list[Evidence]) -> str:
    return results[0].collective.dtype if results and results[0].collective else "float32"
