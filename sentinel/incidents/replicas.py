"""What decides about replicas: ranks that reduce together, compared with each other.

Owns rules 9 to 11: reductions that were not the same or not the sum, contributions of no backward, weights that differ. Every
rule takes a round that all ranks closed and the attempt's history.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator

from sentinel.incidents.describe import plural, rank_list
from sentinel.incidents.finding import Finding, attribution_of, finding, minority
from sentinel.incidents.history import Drift, History
from sentinel.incidents.model import Cause, Kind, Severity, Stage, Verdict
from sentinel.incidents.window import RoundWindow
from sentinel.wire.messages import UNREDUCED, GroupSync

CONFIRM_ROUNDS = 8
"""Replicas that drift for want of a reduction are told after this many rounds or at the end: local SGD averages now and then."""
PATIENT_ROUNDS = 512
"""The same where nothing shows that they are meant to be equal: DiLoCo trains alone for up to 500 rounds before it averages."""
NORM_TOLERANCE = 1e-3
"""Relative difference of two float32 norms of the same numbers that summation order cannot explain."""
SMALLEST = {"float16": 2.0**-24}
"""Spacing of the numbers below a dtype's normal range, where rounding is absolute; only float16's is met in gradients."""
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def unequal_results(window: RoundWindow, history: History) -> Iterator[Finding]:
    """Rule 9: the collectives of a group were not the same ones, or did not return the same on all its ranks."""
    for group, syncs in _by_group(window).items():
        if len(syncs) < 2 or next(iter(syncs.values())).size != len(syncs) + len(window.joined):
            continue
        identities = {rank: (s.identity, s.collectives) for rank, s in syncs.items()}
        results = {rank: s.fingerprint for rank, s in syncs.items()}
        foreign = tuple(sorted(rank for rank, s in syncs.items() if s.foreign))
        if window.broken_off and len({s.collectives for s in syncs.values()}) > 1:
            continue  # some came further than others
        if len(set(identities.values())) > 1 and foreign and len(foreign) < len(syncs):
            history.bad_groups.add(group)
            yield _foreign(window, group, foreign, tuple(syncs))
        elif len(set(identities.values())) > 1:
            history.bad_groups.add(group)
            yield _bad_reduction(
                window,
                "mismatched_collectives",
                minority(identities),
                tuple(syncs),
                f"collectives of group {group} covered different parameters on different ranks",
            )
        elif window.broken_off:
            continue  # what did not return was not looked at
        elif len(set(results.values())) > 1 or _norms_differ(syncs.values()):
            history.bad_groups.add(group)
            yield _bad_reduction(
                window,
                "unequal_results",
                minority(results) if len(set(results.values())) > 1 else _odd_norms(syncs),
                tuple(syncs),
                f"the all-reduces of group {group} returned different values on different ranks",
            )
        else:
            for told in _audit(window, group, syncs):
                history.bad_groups.add(group)
                yield told


def _foreign(window: RoundWindow, group: str, ranks: tuple[int, ...], everyone: tuple[int, ...]) -> Finding:
    return finding(
        window,
        "stale_gradient",
        Kind.BAD_REDUCTION,
        Stage.PRE_REDUCE,
        ranks,
        everyone,
        Cause.COMMUNICATION,
        f"{rank_list(ranks)} gave group {group} tensors that are no parameter's gradient, where the other ranks gave theirs",
    )


def _odd_norms(syncs: dict[int, GroupSync]) -> tuple[int, ...]:
    """Ranks whose norm is away from the median; all of them where most are."""
    middle = statistics.median(s.norm for s in syncs.values())
    odd = tuple(sorted(r for r, s in syncs.items() if abs(s.norm - middle) > NORM_TOLERANCE * abs(middle)))
    return odd if odd and len(odd) * 2 < len(syncs) else tuple(sorted(syncs))


def _norms_differ(syncs: Iterable[GroupSync]) -> bool:
    norms = [s.norm for s in syncs if math.isfinite(s.norm)]
    return bool(norms) and max(norms) - min(norms) > NORM_TOLERANCE * max(norms)


def _audit(window: RoundWindow, group: str, syncs: dict[int, GroupSync]) -> Iterator[Finding]:
    """Rule 9, third form: the result is not the sum of the inputs.

    Linear checksum: sum(result) = sum over ranks of sum(input). No partial sum on the wire is larger than M, the sum of the ranks'
    largest magnitudes. Rounding may so move it by at most (W - 1) * eps/2 * n * M for the additions on the wire, in its dtype, and
    (log2 n + 2) * eps32 * n * M for the checksums of the inputs, and as much for that of the result, which are taken in float32 or
    wider (the bound of pairwise sums: Higham, Accuracy and Stability, ch. 4).
    """
    records = list(syncs.values())
    first = records[0]
    if any(s.audited != first.audited or s.audited < 0 for s in records):
        return
    total = sum(s.sum_in for s in records) / (len(records) if first.audited_op == "AVG" else 1)
    size, numel = len(records), first.audited_numel
    largest = sum(s.audited_absmax for s in records)
    epsilon = EPSILON.get(first.audited_dtype, 2.0**-7)
    adding = (size - 1) * epsilon / 2
    summing = 2 * (math.log2(max(numel, 2)) + 2) * min(epsilon, EPSILON["float32"])
    tolerance = ((adding + summing) * largest + SMALLEST.get(first.audited_dtype, 0.0) * size) * numel
    off = abs(total - first.sum_out)
    if math.isfinite(off) and off > tolerance:
        yield _bad_reduction(
            window,
            "result_is_not_the_sum",
            (),
            tuple(syncs),
            f"collective #{first.audited} of group {group} returned values that sum to {first.sum_out:.6g}, "
            f"but the ranks gave {total:.6g} (rounding explains {tolerance:.2g})",
        )


def stale(window: RoundWindow, _history: History) -> Iterator[Finding]:
    """Rule 10: a rank contributed gradients that no backward of this round produced."""
    ranks = tuple(
        sorted(r for r, c in window.closed.items() if c.backwards == 0 and c.sync and (c.gradient_absmax or 0.0) > 0.0)
    )
    if not ranks or len(ranks) == len(window.closed) or window.broken_off:
        return  # a backward that a failing collective ends does not come to its end
    yield finding(
        window,
        "stale_gradient",
        Kind.BAD_REDUCTION,
        Stage.PRE_REDUCE,
        ranks,
        tuple(window.closed),
        Cause.COMMUNICATION,
        f"{rank_list(ranks)} reduced gradients that no backward of this round produced",
    )


def drifted(window: RoundWindow, history: History) -> Iterator[Finding]:
    """Rule 11: replicas whose weights differ, at the start or since a step that applied unreduced gradients."""
    for closed in window.closed.values():
        if closed.unreduced_total:
            history.unreduced[closed.rank] = closed
    for group, prints in weights_of(window).items():
        ranks = tuple(sorted(prints))
        if (
            len(ranks) < 2
            or group in history.told
            or (group != UNREDUCED and not _is_whole(window, history, group, ranks))
        ):
            continue
        if len(set(prints.values())) == 1:
            history.equal[group] = (window.round, window.step())
            if history.drift is not None and history.drift.group == group:
                history.drift, history.averages = None, True  # local SGD
        elif group in history.equal:
            yield from _differs_since(window, history, group, prints)
        elif group != UNREDUCED and window.round == 0:
            history.told.add(group)
            yield _differs_at_start(window, prints)
    yield from _confirmed(window, history)


def _is_whole(window: RoundWindow, history: History, group: str, ranks: tuple[int, ...]) -> bool:
    """Every rank of the group has told its fingerprint (a group without ranks is the world's)."""
    return set(ranks) == set(history.groups.get(group) or window.closed)


def _differs_at_start(window: RoundWindow, prints: dict[int, int]) -> Finding:
    suspects = minority(prints)
    return finding(
        window,
        "weights_differ_at_start",
        Kind.REPLICA_DIVERGENCE,
        Stage.INIT_WEIGHTS,
        suspects,
        tuple(prints),
        Cause.COMMUNICATION,
        f"parameters that {rank_list(sorted(prints))} reduce together were not equal when the training began "
        "(a seed per rank, and no broadcast?)",
    )


def _differs_since(window: RoundWindow, history: History, group: str, prints: dict[int, int]) -> Iterator[Finding]:
    if group in history.bad_groups:
        history.told.add(group)  # told already, as the wrong reduction that made them differ
        return
    equal_at, equal_step = history.equal[group]
    unreduced = [c for c in history.unreduced.values() if c.round >= equal_at]
    if not unreduced:
        history.told.add(group)
        suspects = minority(prints)
        yield finding(
            window,
            "weights_differ",
            Kind.REPLICA_DIVERGENCE,
            Stage.PARAMS,
            suspects,
            tuple(prints),
            Cause.UNKNOWN,
            f"parameters of group {group} were equal on all ranks at round {equal_at} and differ at round {window.round}, "
            "though the reduced gradients agreed",
            at=(window.round - 1, max(window.step() - 1, equal_step)),
        )
    elif history.drift is None and not history.sees_activations:
        first = unreduced[0]
        history.drift = Drift(
            group,
            equal_at,
            equal_step,
            window.round,
            window.step(),
            tuple(sorted(prints)),
            minority(prints),
            first.unreduced,
            max(c.unreduced_total for c in unreduced),
        )


def _confirmed(window: RoundWindow, history: History) -> Iterator[Finding]:
    drift, since = history.drift, history.together_since
    if drift is None:
        return
    meant = since is not None and window.round - since >= CONFIRM_ROUNDS and not history.averages
    if window.round - drift.differ_at >= (CONFIRM_ROUNDS if meant else PATIENT_ROUNDS):
        history.told.update((drift.group, UNREDUCED))
        history.drift = None
        yield not_reduced(drift)


def not_reduced(drift: Drift) -> Finding:
    """Rule 11: gradients that were applied without having been reduced, and replicas that drifted apart for it."""
    names = drift.unreduced
    what = (
        f"{names[0]} and {plural(drift.unreduced_total - 1, 'other parameter')}" if len(names) > 1 else "".join(names)
    )
    verdict = Verdict(
        rule="not_reduced",
        kind=Kind.REPLICA_DIVERGENCE,
        stage=Stage.NOT_REDUCED,
        attribution=attribution_of(drift.suspects, drift.ranks),
        suspect_ranks=drift.suspects,
        severity=Severity.CRITICAL,
        cause=Cause.COMMUNICATION,
        reason=f"gradients of {what} were applied on {rank_list(drift.ranks)} without being reduced over them: "
        f"weights were equal at round {drift.equal_at} and differ at round {drift.differ_at}",
        parameters=names,
    )
    return Finding(verdict, drift.equal_at, drift.equal_step)


def _by_group(window: RoundWindow) -> dict[str, dict[int, GroupSync]]:
    """Group -> rank -> what it said of the group, in the order of ranks."""
    found: dict[str, dict[int, GroupSync]] = {}
    for rank in sorted(window.closed):
        for sync in window.closed[rank].sync:
            found.setdefault(sync.group, {})[rank] = sync
    return found


def weights_of(window: RoundWindow) -> dict[str, dict[int, int]]:
    """Group -> rank -> fingerprint of the weights that it has in common, as this round begins."""
    found: dict[str, dict[int, int]] = {}
    for rank in sorted(window.closed):
        for weights in window.closed[rank].weights:
            found.setdefault(weights.group, {})[rank] = weights.fingerprint
    return found


def _bad_reduction(
    window: RoundWindow, rule: str, suspects: tuple[int, ...], group: tuple[int, ...], reason: str
) -> Finding:
    return finding(window, rule, Kind.BAD_REDUCTION, Stage.POST_REDUCE, suspects, group, Cause.COMMUNICATION, reason)
