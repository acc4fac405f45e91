"""One fault in each way of reducing gradients: the verdict names the rank, the step and the side of the reduction."""

from __future__ import annotations

import ast
from typing import NamedTuple

import pytest
from training_run import SCRIPTS, Case, Ran

from sentinel.wire.messages import ClosedBy, RoundClosed

pytestmark = pytest.mark.e2e
WARM = True


class Fault(NamedTuple):
    """The verdict that a training must get: everything the first incident is judged by."""

    kind: str
    stage: str
    ranks: tuple[int, ...]
    attribution: str
    step: int = 3


RANK_1 = Fault("nonfinite_gradient", "pre_reduce", (1,), "rank_local")
EVERY_CAST = Fault("nonfinite_gradient", "wire_cast", (0, 1), "all_ranks")

PLANTED = {
    ("ddp_of_four", 4): RANK_1._replace(ranks=(2,)),
    ("ddp_two_of_four", 4): RANK_1._replace(ranks=(0, 3), attribution="multi_rank"),
    ("ddp_first_micro_batch", 2): RANK_1,
    ("fsdp1", 2): RANK_1,
    ("fsdp2_first_micro_batch", 2): RANK_1,
    ("hybrid_sharding", 4): RANK_1._replace(ranks=(2,)),
    ("compression_overflows", 2): EVERY_CAST,
    ("compression_overflows_on_one_rank", 2): EVERY_CAST._replace(ranks=(1,), attribution="rank_local"),
    ("compression_of_nan", 2): RANK_1,
    ("low_rank_of_nan", 2): RANK_1,
    ("low_rank_of_zeros", 2): Fault("nonfinite_gradient", "between_collectives", (0, 1), "all_ranks"),
    ("coalesced", 2): RANK_1,
    ("flattened", 2): RANK_1,
    ("shard_of_the_sum_overflows", 2): Fault("nonfinite_gradient", "post_reduce", (), "reduction_induced"),
    ("skipped_by_the_framework", 2): RANK_1,
    ("sharded_rank_leaves_the_step_out", 2): RANK_1,
    ("gathered_embeddings", 2): RANK_1,
    ("stale_gradient", 2): Fault("bad_reduction", "pre_reduce", (1,), "rank_local"),
    ("stale_flat_gradient", 2): Fault("bad_reduction", "pre_reduce", (1,), "rank_local"),
    ("contribution_of_zeros", 2): Fault("bad_reduction", "pre_reduce", (1,), "rank_local"),
    ("passed_over", 2): Fault("nonfinite_loss", "forward", (1,), "rank_local"),
    ("rounded_away", 2): Fault("stalled_training", "optimizer", (0, 1), "all_ranks", 0),
    ("squares_overflow", 2): Fault("stalled_training", "optimizer", (1,), "rank_local"),
    ("order_differs", 3): Fault("bad_reduction", "post_reduce", (1,), "rank_local"),
    ("weights_changed", 3): Fault("replica_divergence", "params", (1,), "rank_local"),
}
MOVING = {
    ("experts", 2): RANK_1,
    ("gathered_into_one_tensor", 2): RANK_1,
    ("teacher_handed_round", 2): RANK_1._replace(ranks=(0,)),
    ("pipeline_first_stage", 2): RANK_1._replace(ranks=(0,)),
    ("pipeline_last_stage", 2): RANK_1,
    ("replicated_pipeline_first_stage", 4): RANK_1._replace(ranks=(2,)),
    ("replicated_pipeline_last_stage", 4): RANK_1._replace(ranks=(3,)),
    ("sharded_optimizer", 2): Fault("nonfinite_parameters", "optimizer", (1,), "rank_local"),
    ("buffers_handed_round", 2): Fault("nonfinite_buffers", "forward", (0,), "rank_local"),
    ("divided_by_zero_tokens", 2): Fault("nonfinite_gradient", "post_reduce", (0, 1), "all_ranks"),
    ("never_waited_for", 2): Fault("misuse", "optimizer", (1,), "rank_local"),
    ("unfrozen", 2): Fault("replica_divergence", "not_reduced", (0, 1), "all_ranks"),
    ("checkpoint_of_rank_0", 2): Fault("nonfinite_parameters", "init_weights", (0,), "rank_local", 0),
    ("layer_added", 2): Fault("replica_divergence", "not_reduced", (0, 1), "all_ranks"),
    ("alone", 2): RANK_1,  # and its weights differ from the start
}
BROKEN = {
    ("one_rank_receives_nan", 2): Fault("bad_reduction", "post_reduce", (1,), "rank_local"),
    ("one_rank_receives_another_sum", 3): Fault("bad_reduction", "post_reduce", (1,), "rank_local"),
    ("a_contribution_is_lost", 2): Fault("bad_reduction", "post_reduce", (), "none"),
    # Only its owner sees a shard's result, so that nobody can be compared with him: no rank is accused.
    ("a_shard_arrives_broken", 2): Fault("bad_reduction", "post_reduce", (), "reduction_induced"),
}
# What is not right yet, and why; each goes as soon as it is.
TRAININGS = {"faulty.py": PLANTED, "moving.py": MOVING, "faulty_backend.py": BROKEN}


CASES = {
    name: (Case(script, (name,), ranks=ranks), fault)
    for script, trainings in TRAININGS.items()
    for (name, ranks), fault in trainings.items()
}
TOLD_APART = ("weights_changed", "sharded_rank_leaves_the_step_out", "alone")
DATED = [pytest.param(*one, id=name) for name, one in CASES.items() if name not in TOLD_APART]


@pytest.mark.parametrize(("case", "fault"), DATED)
def test_the_fault_is_named(ran: Ran, fault: Fault) -> None:
    """Exactly one incident, with the kind, stage, ranks, attribution and step of what was planted."""
    assert ran.exit_code == 0, ran.said
    found = [
        Fault(i["kind"], i["stage"], tuple(i["suspect_ranks"]), i["attribution"], i["step"]) for i in ran.incidents
    ]
    assert found == [fault], ran.said
    assert not ran.faults


@pytest.mark.parametrize("case", [CASES["weights_changed"][0]], ids=str)
def test_replicas_that_drift_apart_are_told_between_two_looks(ran: Ran) -> None:
    """The weights of a small model are compared in every round: a change after step 5 is found in the next, and dated so."""
    (incident,) = ran.incidents
    fault = CASES["weights_changed"][1]
    assert (incident["kind"], incident["stage"], tuple(incident["suspect_ranks"])) == fault[:3], ran.said
    assert incident["step"] == 5


@pytest.mark.parametrize("case", [CASES["sharded_rank_leaves_the_step_out"][0]], ids=str)
def test_a_rank_that_leaves_out_a_sharded_step_is_named_first(ran: Ran) -> None:
    """Its own gradients are the origin, the other's step is what it has led to, and writing its part breaks no later forward.

    The round is closed inside the next one, where FSDP has gathered parameters that the other rank has poisoned.
    """
    assert ran.exit_code == 0, ran.said
    first, second = ran.incidents
    fault = CASES["sharded_rank_leaves_the_step_out"][1]
    assert (first["kind"], first["stage"], tuple(first["suspect_ranks"]), first["step"]) == (*fault[:3], 3), ran.said
    assert (second["kind"], second["step"]) == ("step_disagreement", 3), ran.said


@pytest.mark.parametrize("case", [CASES["alone"][0]], ids=str)
def test_gradients_that_nobody_reduces_are_looked_at_all_the_same(ran: Ran) -> None:
    """Before clipping spreads it over all of them: the parameter's name is the guilty one's, beside the lack of a reduction."""
    assert ran.exit_code == 0, ran.said
    found = {i["kind"]: i for i in ran.incidents}
    assert set(found) == {"nonfinite_gradient", "replica_divergence"}, ran.said
    fault, one = CASES["alone"][1], found["nonfinite_gradient"]
    assert (one["stage"], tuple(one["suspect_ranks"]), one["attribution"], one["step"]) == fault[1:], ran.said


@pytest.mark.parametrize("case", [CASES["skipped_by_the_framework"][0]], ids=str)
def test_a_step_that_a_framework_left_out_is_a_round(ran: Ran) -> None:
    """Without a call of the optimizer the round still ends, as skipped by the framework, and the count of steps goes on."""
    closed = sorted((r for r in ran.reports if isinstance(r, RoundClosed) and r.rank == 0), key=lambda r: r.round)
    assert [r.closed_by for r in closed].count(ClosedBy.FRAMEWORK_SKIPPED) == 1
    assert [r.step for r in closed if r.closed_by is ClosedBy.FRAMEWORK_SKIPPED] == [3]
    assert [r.step for r in closed] == list(range(8))


@pytest.mark.parametrize(
    "case", [CASES[name][0] for name in ("flattened", "coalesced", "ddp_first_micro_batch")], ids=str
)
def test_an_echo_is_no_second_incident(ran: Ran) -> None:
    """Rounds after the fault, nonfinite on every rank, count as the same incident."""
    assert [i["occurrences"] for i in ran.incidents] == [3], ran.said


@pytest.mark.parametrize("script", sorted(TRAININGS))
def test_every_training_is_run(script: str) -> None:
    """No training of the scripts is left out of the tables here."""
    functions = [n for n in ast.parse((SCRIPTS / script).read_text()).body if isinstance(n, ast.FunctionDef)]
    assert {f.name for f in functions if not f.name.startswith("_")} == {name for name, _ in TRAININGS[script]}
