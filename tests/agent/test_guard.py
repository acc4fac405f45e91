"""The guard decides by what all ranks share, within its budget, and not at all where ranks may differ."""

from __future__ import annotations

import pytest

from sentinel.wire.messages import Check, Guarded, Role
from sentinel_agent.errors import Health
from sentinel_agent.guard import Budget, Guard, is_shared
from sentinel_agent.rounds import Reduction, Round


def reduction(op: str = "allreduce_", ranks: tuple[int, ...] = (), *, sharded: bool = False) -> Reduction:
    """A gradient collective over ``ranks`` (none: the world)."""
    check = Check(4, 1, 0, 1.0)
    return Reduction(op, "0", ranks, 0, "SUM", "float32", Role.GRADIENT, check, sharded=sharded)


def health() -> Health:
    """A health that nobody listens to."""
    return Health(0, lambda _reason: None)


def poisoned(*reductions: Reduction) -> Round:
    """A round whose reductions all returned something nonfinite."""
    guard, round_ = Guard("observe", Budget(1, 1), health(), lambda: True), Round(0)
    for one in reductions:
        guard.issued(one, round_)
        guard.returned_nonfinite(one, round_)
        round_.gradient_nonfinite = True
    return round_


def judge(guard: Guard, round_: Round, *, in_backward: bool = False, scaler_skips: bool = False) -> Guarded:
    """What the guard does about the round."""
    guard.backward_begins()
    return guard.judge(round_, in_backward=in_backward, scaler_skips=scaler_skips)


@pytest.mark.parametrize(
    ("policy", "decision"), [("observe", Guarded.NO), ("skip", Guarded.SKIPPED), ("halt", Guarded.HALTED)]
)
def test_each_policy_does_what_it_says(policy: str, decision: Guarded) -> None:
    """A poisoned round is left alone, skipped or ends the training; a healthy one is always left alone."""
    guard = Guard(policy, Budget(10, 100), health(), lambda: True)
    assert judge(guard, poisoned(reduction())) is decision
    assert judge(guard, Round(1)) is Guarded.NO


def test_an_unknown_policy_is_refused() -> None:
    """A policy that does not exist is an error that names those that do."""
    with pytest.raises(ValueError, match="observe, skip, halt"):
        Guard("stop", Budget(1, 1), health(), lambda: True)


@pytest.mark.parametrize(
    ("one", "shared"),
    [
        (reduction(), True),
        (reduction("allreduce_coalesced_"), True),
        (reduction("_reduce_scatter_base_", sharded=True), True),
        (reduction("allreduce_", (0, 2), sharded=True), True),
        (reduction("allreduce_", (0, 2)), False),
        (reduction("reduce_"), False),
        (reduction("_reduce_scatter_base_"), False),
    ],
)
def test_only_shared_results_decide(one: Reduction, shared: bool) -> None:
    """All ranks know an all-reduce over the world, and FSDP's shards by agreement; anything else is left to the script."""
    assert is_shared(one) is shared
    guard = Guard("skip", Budget(10, 100), health(), lambda: True)
    assert judge(guard, poisoned(one)) is (Guarded.SKIPPED if shared else Guarded.UNDECIDED)


def test_a_mixture_is_undecided() -> None:
    """Where some gradients are reduced in groups, a rank cannot tell what the others know, even if it sees more itself."""
    guard = Guard("halt", Budget(10, 100), health(), lambda: True)
    assert judge(guard, poisoned(reduction(), reduction(ranks=(0, 1)))) is Guarded.UNDECIDED


def test_what_is_undecided_is_counted_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Every undecided round is counted under its name, and each reason is said once."""
    kept = health()
    guard = Guard("skip", Budget(10, 100), kept, lambda: False)
    for _ in range(3):
        assert judge(guard, poisoned(reduction())) is Guarded.UNDECIDED
    assert judge(guard, poisoned(reduction()), in_backward=True) is Guarded.UNDECIDED
    assert kept.drops == {"guard_undecided": 4}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "not every rank has a guard" in said[0]
    assert "inside of backward" in said[1]


def test_a_scaler_s_own_skip_is_left_alone() -> None:
    """What the GradScaler leaves out needs no guard, and costs no budget."""
    guard = Guard("halt", Budget(0, 0), health(), lambda: True)
    assert judge(guard, poisoned(reduction()), scaler_skips=True) is Guarded.NO


def test_the_budget_in_a_row_is_given_back_by_a_healthy_round() -> None:
    """Two skips in a row are allowed, again and again; a third in a row halts."""
    guard = Guard("skip", Budget(2, 100), health(), lambda: True)
    for _ in range(5):
        assert judge(guard, poisoned(reduction())) is Guarded.SKIPPED
        assert judge(guard, poisoned(reduction())) is Guarded.SKIPPED
        assert judge(guard, Round(0)) is Guarded.NO
    decisions = [judge(guard, poisoned(reduction())) for _ in range(3)]
    assert decisions == [Guarded.SKIPPED, Guarded.SKIPPED, Guarded.HALTED]


def test_the_budget_in_all_is_spent_for_good() -> None:
    """However many healthy rounds lie between, the step after the last allowed skip halts."""
    guard = Guard("skip", Budget(10, 3), health(), lambda: True)
    decisions = []
    for _ in range(4):
        decisions.append(judge(guard, poisoned(reduction())))
        judge(guard, Round(0))
    assert decisions == [Guarded.SKIPPED] * 3 + [Guarded.HALTED]


def test_a_decision_holds_until_the_next_backward() -> None:
    """A second optimizer of the same backward finds the decision of the first."""
    guard = Guard("skip", Budget(10, 100), health(), lambda: True)
    judge(guard, poisoned(reduction()))
    assert guard.decision is Guarded.SKIPPED
    guard.backward_begins()
    assert guard.decision is Guarded.NO
