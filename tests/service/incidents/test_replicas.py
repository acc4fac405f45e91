"""Ranks that reduce together, compared: results, sums, contributions, weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from service.incidents.rounds import Round, World, found, only, sync, synced

from sentinel.incidents.comparisons import at_end, compare
from sentinel.incidents.events import RunEnded
from sentinel.incidents.finding import attribution_of, minority
from sentinel.incidents.history import History
from sentinel.incidents.model import Attribution, Cause, Kind, Severity, Stage, State
from sentinel.incidents.replicas import CONFIRM_ROUNDS, PATIENT_ROUNDS
from sentinel.incidents.tracker import RESOLVE_ROUNDS
from sentinel.wire.messages import UNREDUCED, ClosedBy, Weights

AUDIT: dict[str, Any] = {
    "audited": 0,
    "audited_numel": 1000,
    "audited_absmax": 1.0,
    "audited_op": "SUM",
    "audited_dtype": "float32",
}


def weighed(told: Round, prints: Mapping[int, int], group: str = "0") -> Round:
    """The same with fingerprints of weights."""
    for rank, fingerprint in prints.items():
        told.record(rank, weights=(Weights(group, fingerprint, 5),))
    return told


# --- results -------------------------------------------------------------------------------------------------------------

RESULTS: list[tuple[str, Round, str, tuple[int, ...], Attribution]] = [
    (
        "one rank of three got other bits",
        synced(3, {2: {"fingerprint": 12}}),
        "unequal_results",
        (2,),
        Attribution.RANK_LOCAL,
    ),
    (
        "two ranks got different bits: there is no majority",
        synced(2, {1: {"fingerprint": 12}}),
        "unequal_results",
        (0, 1),
        Attribution.ALL_RANKS,
    ),
    (
        "two against two",
        synced(4, {0: {"fingerprint": 12}, 3: {"fingerprint": 12}}),
        "unequal_results",
        (0, 1, 2, 3),
        Attribution.ALL_RANKS,
    ),
    (
        "one rank reduced other parameters",
        synced(3, {1: {"identity": 8, "fingerprint": 12}}),
        "mismatched_collectives",
        (1,),
        Attribution.RANK_LOCAL,
    ),
    (
        "one rank reduced one collective more",
        synced(3, {0: {"collectives": 3}}),
        "mismatched_collectives",
        (0,),
        Attribution.RANK_LOCAL,
    ),
    (
        "the sum that came back is not the sum that was given",
        synced(2, {}, sum_in=5.0, sum_out=11.0, **AUDIT),
        "result_is_not_the_sum",
        (),
        Attribution.NONE,
    ),
    (
        "a mean that was not divided",
        synced(2, {}, sum_in=5.0, sum_out=10.0, **{**AUDIT, "audited_op": "AVG"}),
        "result_is_not_the_sum",
        (),
        Attribution.NONE,
    ),
]


@pytest.mark.parametrize(
    ("sentence", "told", "rule", "suspects", "attribution"), RESULTS, ids=[row[0] for row in RESULTS]
)
def test_a_reduction_that_went_wrong_is_found(
    sentence: str, told: Round, rule: str, suspects: tuple[int, ...], attribution: Attribution
) -> None:
    """A bad reduction after the fact, critical, with the ranks that differ from the rest."""
    one = only(found(told))
    verdict = one.verdict
    assert (verdict.rule, verdict.suspect_ranks, verdict.attribution) == (rule, suspects, attribution)
    assert (verdict.kind, verdict.stage) == (Kind.BAD_REDUCTION, Stage.POST_REDUCE)
    assert (verdict.severity, verdict.cause) == (Severity.CRITICAL, Cause.COMMUNICATION)
    assert (one.round, one.step) == (4, 4)
    assert verdict.reason.isprintable()


FINE = [
    ("all the same", synced(3, {})),
    ("norms that differ by summation order", synced(3, {1: {"norm": 1.0 + 1e-4}})),
    ("a norm that one rank could not compute", synced(3, {1: {"norm": math.nan}})),
    ("a rank's record of the group is missing", synced(3, {1: {"fingerprint": 12}}).record(2, sync=())),
    ("a group of one", synced(1, {})),
    ("ranks that reduce nothing", Round(3, 4)),
    ("the sum is right", synced(2, {}, sum_in=5.0, sum_out=10.0, **AUDIT)),
    ("the mean is right", synced(2, {}, sum_in=5.0, sum_out=5.0, **{**AUDIT, "audited_op": "AVG"})),
    ("the sum is off by rounding", synced(2, {}, sum_in=5.0, sum_out=10.0 + 1e-6, **AUDIT)),
    ("the ranks audited different collectives", synced(2, {1: {"audited": 1}}, sum_in=5.0, sum_out=1.0, **AUDIT)),
    ("the audited sum was nonfinite", synced(2, {}, sum_in=5.0, sum_out=math.inf, **AUDIT)),
]


@pytest.mark.parametrize(("sentence", "told"), FINE, ids=[row[0] for row in FINE])
def test_a_healthy_reduction_is_not_accused(sentence: str, told: Round) -> None:
    """No false alarm."""
    assert found(told) == []


def test_norms_that_rounding_does_not_explain_are_unequal_results() -> None:
    """Also where the bits had no turn to be fingerprinted in this round."""
    verdict = only(found(synced(3, {1: {"norm": 1.1}}))).verdict
    assert verdict.rule == "unequal_results"


def test_the_rank_whose_norm_differs_is_the_suspect() -> None:
    """Equal fingerprints accuse nobody; the norm does."""
    assert only(found(synced(3, {1: {"norm": 1.1}}))).verdict.suspect_ranks == (1,)


def test_groups_are_compared_each_by_itself() -> None:
    """Tensor-parallel groups hold different parameters and may differ from each other."""
    told = Round(4, 4)
    for rank in range(4):
        group, ranks = ("left", (0, 1)) if rank < 2 else ("right", (2, 3))
        told.record(rank, sync=(sync(2, group=group, ranks=ranks, fingerprint=20 if rank < 2 else 30 + rank),))
    verdict = only(found(told)).verdict
    assert verdict.suspect_ranks == (2, 3)
    assert "right" in verdict.reason


def test_nonfinite_rounds_are_not_compared() -> None:
    """NaN spoils sums and bits; the round has another verdict."""
    assert found(synced(3, {2: {"fingerprint": 12}}).nan_gradient(1)) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_zeroed_contribution_is_more_than_rounding(dtype: str) -> None:
    """One of two ranks' 1,000 ones did not arrive."""
    told = synced(2, {}, sum_in=1000.0, sum_out=1000.0, **{**AUDIT, "audited_dtype": dtype})
    assert only(found(told)).verdict.rule == "result_is_not_the_sum"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounding_on_the_wire_is_bounded_by_what_the_ranks_gave(dtype: str) -> None:
    """Four ranks give a hundred ones each: three additions may each be off by half a spacing of at most four, and no more."""
    spacing = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}[dtype]
    wire = 3 * spacing / 2 * 4.0 * 100
    given = {"audited_numel": 100, "audited_absmax": 1.0, "audited_dtype": dtype, "audited_op": "SUM", "audited": 0}
    assert found(synced(4, {}, sum_in=100.0, sum_out=400.0 + 0.9 * wire, **given)) == []
    checksums = 2 * (math.log2(100) + 2) * 2.0**-23 * 4.0 * 100
    off = 400.0 + 1.01 * (wire + checksums) + 100 * 4 * 2.0**-24
    assert only(found(synced(4, {}, sum_in=100.0, sum_out=off, **given))).verdict.rule == "result_is_not_the_sum"


# --- contributions -------------------------------------------------------------------------------------------------------


def test_a_contribution_of_no_backward_is_that_ranks_fault() -> None:
    """It reduced what an earlier round had left in its gradients."""
    one = only(found(synced(3, {}).record(1, backwards=0)))
    assert (one.verdict.rule, one.verdict.kind, one.verdict.stage) == (
        "stale_gradient",
        Kind.BAD_REDUCTION,
        Stage.PRE_REDUCE,
    )
    assert (one.verdict.suspect_ranks, one.verdict.attribution) == ((1,), Attribution.RANK_LOCAL)


def test_a_round_that_breaks_off_is_compared_no_further() -> None:
    """A rank that dies makes the others' collectives fail: theirs did not come to an end either, and nobody gave anything stale."""
    died = {"backwards": 0, "closed_by": ClosedBy.EXIT}
    for before_its_backward in (False, True):
        told = synced(3, {1: {"fingerprint": 99}, 2: {"fingerprint": 99, "collectives": 1, "identity": 5}})
        for rank in range(3):
            told.record(rank, **died)
        assert found(told.record(0, sync=()) if before_its_backward else told) == []


def test_collectives_that_do_not_match_are_told_though_the_job_dies_of_it() -> None:
    """As many on each rank, and not the same ones: that is what it died of."""
    died = {"backwards": 0, "closed_by": ClosedBy.EXIT}
    told = synced(3, {2: {"identity": 5}})
    one = only(found(told.record(0, **died).record(1, **died).record(2, **died)))
    assert (one.verdict.rule, one.verdict.suspect_ranks) == ("mismatched_collectives", (2,))


@pytest.mark.parametrize("largest", [0.0, None])
def test_a_rank_that_joins_with_zeros_is_not_stale(largest: float | None) -> None:
    """Uneven inputs: a rank out of batches gives zeros."""
    assert found(synced(3, {}).record(1, backwards=0, gradient_absmax=largest)) == []


def test_backwards_that_nobody_saw_are_not_stale() -> None:
    """If no rank's backward was seen, the tap is blind, and nobody is accused."""
    told = synced(3, {})
    for rank in range(3):
        told.record(rank, backwards=0)
    assert found(told) == []


# --- weights -------------------------------------------------------------------------------------------------------------


def test_weights_that_differ_at_the_start_are_found_at_once() -> None:
    """Round 0 compares before the first step; among three, the odd one is named."""
    one = only(found(weighed(synced(3, {}, number=0), {0: 1, 1: 1, 2: 9})))
    assert (one.verdict.rule, one.verdict.kind) == ("weights_differ_at_start", Kind.REPLICA_DIVERGENCE)
    assert (one.verdict.stage, one.verdict.suspect_ranks, one.round) == (Stage.INIT_WEIGHTS, (2,), 0)


def test_weights_are_compared_only_when_all_of_the_group_told_theirs() -> None:
    """A rank's fingerprint may be missing."""
    history = History(groups={"0": (0, 1, 2)})
    assert found(weighed(synced(3, {}, number=0), {0: 1, 1: 9}), history) == []


def test_weights_that_part_though_results_agreed_are_found() -> None:
    """Somebody wrote to them outside of the optimizer: dated between the two looks, told once."""
    history = History()
    assert found(weighed(synced(2, {}, number=2), {0: 1, 1: 1}), history) == []
    one = only(found(weighed(synced(2, {}, number=4), {0: 2, 1: 3}), history))
    assert (one.verdict.rule, one.verdict.stage, one.round) == ("weights_differ", Stage.PARAMS, 3)
    assert one.verdict.suspect_ranks == (0, 1)
    assert found(weighed(synced(2, {}, number=8), {0: 4, 1: 5}), history) == []


def unreduced(told: Round) -> Round:
    """The same round with a parameter that no collective reduced."""
    for rank in range(told.size):
        told.record(rank, unreduced=("head.weight",), unreduced_total=1)
    return told


def test_unreduced_gradients_are_told_when_replicas_stay_apart() -> None:
    """Dated to the last equal weights; not before a local SGD would have averaged."""
    history, findings = History(), []
    for number in range(CONFIRM_ROUNDS + 2):
        prints = {0: number, 1: number if number == 0 else -number}
        findings += found(unreduced(weighed(synced(2, {}, number=number), prints, UNREDUCED)), history)
    one = only(findings)
    assert (one.verdict.rule, one.verdict.stage) == ("not_reduced", Stage.NOT_REDUCED)
    assert (one.verdict.suspect_ranks, one.verdict.parameters, one.round) == ((0, 1), ("head.weight",), 0)


def test_local_sgd_that_averages_again_is_healthy() -> None:
    """Replicas part on purpose and meet again before the confirmation."""
    history = History()
    for number in range(4 * CONFIRM_ROUNDS):
        apart = number % 4 != 0
        prints = {0: number, 1: -number if apart else number}
        assert found(unreduced(weighed(synced(2, {}, number=number), prints, UNREDUCED)), history) == []


def apart(number: int, *, together: bool) -> Round:
    """A round of two ranks that train alone since round 0, with or without a reduction of something else."""
    told = synced(2, {}, number=number) if together else Round(2, number)
    return unreduced(weighed(told, {0: number, 1: -number}, UNREDUCED))


def test_where_nothing_is_ever_reduced_there_is_patience() -> None:
    """DiLoCo trains alone for hundreds of rounds before its first average."""
    history, findings = History(), []
    for number in range(PATIENT_ROUNDS + 2):
        if findings := found(apart(number, together=False), history):
            break
    assert (only(findings).round, number) == (0, PATIENT_ROUNDS + 1)
    assert at_end(history) == []


def test_a_wrapper_shows_that_weights_are_meant_to_be_equal() -> None:
    """DDP's own group has weights though nothing reduces them: the model was called past its wrapper."""
    history, findings = History(), []
    for number in range(CONFIRM_ROUNDS + 2):
        told = apart(number, together=False)
        for rank in (0, 1):
            told.record(rank, weights=(Weights(UNREDUCED, number if rank else -number, 5), Weights("0", 7, 5)))
        findings += found(told, history)
    assert only(findings).verdict.rule == "not_reduced"


def test_local_sgd_that_averages_seldom_is_healthy() -> None:
    """Its averages are the first that is reduced at all; from the second on, it is known to average."""
    history = History()
    period = 5 * CONFIRM_ROUNDS
    for number in range(4 * period - 2):
        averaged = number % period == 0
        told = synced(2, {}, number=number) if averaged and number else Round(2, number)
        prints = {0: number, 1: number if averaged else -number}
        assert found(unreduced(weighed(told, prints, UNREDUCED)), history) == []
    assert at_end(history) == []


def test_weights_and_what_was_not_reduced_may_be_told_in_the_same_round() -> None:
    """Of a large model both are looked at in few rounds: they are the reason of each other all the same."""
    history = History()
    found(weighed(synced(2, {}, number=8), {0: 1, 1: 1}, UNREDUCED), history)
    assert found(unreduced(weighed(synced(2, {}, number=16), {0: 2, 1: 3}, UNREDUCED)), history) == []
    (one,) = at_end(history)
    assert (one.verdict.rule, one.round) == ("not_reduced", 8)


def test_what_waited_for_confirmation_is_told_at_the_end() -> None:
    """A short run with a missing reduction is not silent, and tells it once."""
    history = History()
    for number, prints in enumerate([{0: 1, 1: 1}, {0: 2, 1: 3}]):
        assert found(unreduced(weighed(synced(2, {}, number=number), prints, UNREDUCED)), history) == []
    assert [one.verdict.rule for one in at_end(history)] == ["not_reduced"]


def test_an_empty_window_is_not_compared() -> None:
    """Nobody closed the round."""
    assert compare(Round(2).unclosed(0, 1).window(), History()) == []


# --- in the life of a run ------------------------------------------------------------------------------------------------


def test_a_bad_reduction_is_an_incident_that_is_seen_again_and_resolved() -> None:
    """The same rank differs in three rounds, then no more."""
    world = World(3)
    for number in range(3):
        world.tell(synced(3, {2: {"fingerprint": 12}}, number=number))
    world.next_round = 3
    assert (world.incident.occurrences, world.incident.suspect_ranks, world.incident.round) == (3, (2,), 0)
    world.healthy(RESOLVE_ROUNDS)
    assert world.incident.state is State.RESOLVED


def test_the_end_of_the_run_tells_it_once() -> None:
    """Also when the end is said twice."""
    world = World(2)
    for number, prints in enumerate([{0: 1, 1: 1}, {0: 2, 1: 3}]):
        world.tell(unreduced(weighed(synced(2, {}, number=number), prints, UNREDUCED)))
    world.feed(RunEnded())
    world.feed(RunEnded())
    assert (world.incident.kind, world.incident.occurrences) == (Kind.REPLICA_DIVERGENCE, 1)


# --- majorities ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({0: 1, 1: 1, 2: 2}, (2,)),
        ({0: 1, 1: 2}, (0, 1)),
        ({0: 1, 1: 2, 2: 3}, (0, 1, 2)),
        ({0: 1, 1: 1, 2: 2, 3: 2}, (0, 1, 2, 3)),
        ({4: 1, 5: 1, 6: 1, 7: 2, 8: 3}, (7, 8)),
        ({0: 1, 1: 1}, ()),
    ],
)
def test_a_minority_needs_a_strict_majority(values: dict[int, int], ranks: tuple[int, ...]) -> None:
    """Where there is none, all are concerned."""
    assert minority(values) == ranks


@pytest.mark.parametrize(
    ("ranks", "group", "attribution"),
    [
        ((), (0, 1), Attribution.NONE),
        ((1,), (0, 1), Attribution.RANK_LOCAL),
        ((0, 1), (0, 1), Attribution.ALL_RANKS),
        ((0, 1), (0, 1, 2), Attribution.MULTI_RANK),
        ((0,), (0,), Attribution.RANK_LOCAL),
    ],
)
def test_attribution_relates_ranks_to_their_group(
    ranks: tuple[int, ...], group: tuple[int, ...], attribution: Attribution
) -> None:
    """One rank is local even where it is the whole group."""
    assert attribution_of(ranks, group) is attribution
