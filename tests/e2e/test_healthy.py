"""Healthy training is never called anything else: habits of real scripts and frameworks, each a small training of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
from training_run import SCRIPTS, Case, Ran

from sentinel.wire.messages import RoundClosed

pytestmark = pytest.mark.e2e
WARM = True

# Training -> rounds it has: what a scan of the script's loop says. A quiet run that nobody watched would prove nothing.
LOOPS = {
    "accumulation_without_no_sync": 6,
    "accumulation_with_no_sync": 6,
    "gan_alternating": 12,
    "gan_joint": 6,
    "lbfgs": 18,  # three evaluations of the closure per step
    "backward_inside_step": 6,
    "steps_left_out": 6,
    "uneven_inputs": 9,
    "moving_average_of_weights": 6,
    "local_sgd": 20,
    "gradients_zeroed_in_place": 6,
    "gradients_dropped_by_hand": 6,
    "manual_sgd": 6,
    "manual_everything": 6,
    "validation_between_steps": 6,
    "perplexity_that_overflows": 6,
    "metric_that_is_nan": 6,
    "numbers_of_other_types": 6,
    "parameters_frozen": 6,
    "one_loader_after_another": 8,
    "ends_with_sys_exit": 6,
}
PRECISION = {
    "scaler_that_settles": 14,
    "scaler_that_grows": 20,
    "bfloat16_autocast": 6,
    "bfloat16_parameters": 6,
    "bfloat16_large_buckets": 12,
    "gradient_checkpointing": 6,
    "batch_norm_and_dropout": 6,
    "synchronised_norm": 6,
    "masks_of_infinity": 6,
    "compressed_by_a_hook": 6,
    "zero_gradients_for_a_while": 12,
}
SHARDING = {
    "fsdp1": 6,
    "fsdp2_accumulating": 6,
    "hybrid_sharding": 6,
    "zero_redundancy_optimizer": 6,
    "flattened_gradients": 6,
    "coalesced_gradients": 6,
    "functional_collectives": 6,
    "tensor_parallel": 6,
    "pipeline": 6,
    "pipeline_of_equal_stages": 12,
    "experts_of_equal_start": 12,
    "padding_of_nan_is_handed_round": 6,
}
AVERAGING = {  # each in a launch of its own: what another has reduced would say that ranks are meant to be equal
    "local_sgd_of_one_vector": 40,
    "local_sgd_that_gathers": 40,
    "outer_steps": 40,
}
TRAININGS = {
    "healthy_loops.py": LOOPS,
    "healthy_precision.py": PRECISION,
    "healthy_sharding.py": SHARDING,
    "healthy_averaging.py": AVERAGING,
}
FOUR_RANKS = {"hybrid_sharding"}
TOGETHER = 5
"""Trainings of one launch, one after another in the same processes: an agent has to bear that, and launches take long."""


def launches() -> Iterator[tuple[Case, int]]:
    """Every training, a few at a time, and how many rounds they have together."""
    for script, trainings in TRAININGS.items():
        for ranks in (2, 4):
            names = [name for name in trainings if (4 if name in FOUR_RANKS else 2) == ranks]
            size = 1 if trainings is AVERAGING else TOGETHER
            for some in (tuple(names[at : at + size]) for at in range(0, len(names), size)):
                yield Case(script, some, ranks=ranks), sum(trainings[name] for name in some)


LAUNCHES = dict(launches())


def launch_of(training: str) -> Any:
    """The launch that a training is part of, as a parameter."""
    return pytest.param(next(case for case in LAUNCHES if training in case.arguments), id=training)


@pytest.mark.parametrize(("case", "rounds"), LAUNCHES.items(), ids=str)
def test_nothing_is_said_of_healthy_training(ran: Ran, rounds: int) -> None:
    """The trainings end by themselves, each of their rounds was checked, and there is no incident, no fault and no drop."""
    assert ran.exit_code == 0, ran.said
    assert ran.brief == [], ran.said
    assert ran.counts["rounds_checked"] == rounds, ran.said
    assert not ran.faults
    assert not ran.drops
    assert "sentinel: no incidents in" in ran.stderr


@pytest.mark.parametrize("case", [launch_of("scaler_that_settles")])
def test_a_scaler_that_searches_is_counted(ran: Ran) -> None:
    """Steps that GradScalers leave out in their search are counted as benign, and the scale moved because of them."""
    assert ran.counts["benign_skips"] >= 4, ran.said
    assert f"{ran.counts['benign_skips']} benign GradScaler skips" in ran.stderr


@pytest.mark.parametrize("case", [launch_of("lbfgs")])
def test_a_closure_evaluated_again_is_the_same_step(case: Case, ran: Ran) -> None:
    """LBFGS's evaluations are rounds of their own, but the step is the loop's: six iterations are six steps."""
    before = case.arguments[: case.arguments.index("lbfgs")]
    first = sum(LOOPS[name] for name in before)
    steps = [{r.step for r in ran.reports if isinstance(r, RoundClosed) and r.round == first + n} for n in range(18)]
    told = sorted(set().union(*steps))
    assert [told.index(*step) for step in steps] == [iteration for iteration in range(6) for _ in range(3)]


@pytest.mark.parametrize("script", sorted(TRAININGS))
def test_every_training_is_run(script: str) -> None:
    """No training of the scripts is left out of the tables here."""
    functions = [n for n in ast.parse((SCRIPTS / script).read_text()).body if isinstance(n, ast.FunctionDef)]
    assert {f.name for f in functions if not f.name.startswith("_")} == TRAININGS[script].keys()
