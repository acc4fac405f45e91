"""Healthy training is the same with and without Sentinel: every loss and every final parameter, bit for bit."""

from __future__ import annotations

import ast

import pytest
from training_run import SCRIPTS, Ahead, Case, Ran

from sentinel.wire.messages import ClosedBy, RoundClosed

pytestmark = pytest.mark.e2e

TRAININGS = (
    "ddp_clip_accumulation",
    "float16_scaler_dropout",
    "fsdp2_adamw",
    "bucket_views",
    "unused_parameters",
    "static_graph",
    "own_hook_before_the_first_backward",
    "own_hook_after_the_first_backward",
    "compiled_around_ddp",
    "compiled_inside_ddp",
    "forked_loader_workers",
    "spawned_loader_workers",
)
# All in one process, one after another: an agent has to bear that too.
PLAIN = Case("identical.py", TRAININGS, watched=False)
WATCHED = Case("identical.py", TRAININGS)
SPAWNING = Case("spawning.py", ranks=1)


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize(("plain", "watched"), [pytest.param(PLAIN, WATCHED, id="bits")])
def test_results_are_the_same_bit_for_bit(ahead: Ahead, plain: Case, watched: Case, training: str) -> None:
    """Losses and final parameters of every rank have the same SHA-256 under sentinel run as under torchrun."""
    expected = ahead.of(plain).printed(training)
    assert set(expected) == {0, 1}, ahead.of(plain).said
    assert ahead.of(watched).printed(training) == expected, ahead.of(watched).said


@pytest.mark.parametrize("case", [pytest.param(WATCHED, id="watched")])
def test_several_trainings_in_one_process_raise_no_alarm(ran: Ran) -> None:
    """Twelve models trained one after another in the same processes: every round is seen, nothing is said, nothing is swallowed."""
    assert ran.exit_code == 0, ran.said
    assert ran.brief == [], ran.said
    assert ran.counts["rounds_checked"] == 6 * len(TRAININGS) + 6
    assert not ran.faults
    assert not ran.drops


@pytest.mark.parametrize("case", [pytest.param(SPAWNING, id="spawn")])
@pytest.mark.parametrize("plain", [pytest.param(Case("spawning.py", ranks=1, watched=False), id="plain")])
def test_ranks_that_the_script_spawns_are_watched(ahead: Ahead, ran: Ran, plain: Case) -> None:
    """A script that makes its ranks by mp.spawn runs unchanged, and their rounds are seen."""
    assert ran.exit_code == 0, ran.said
    assert ran.printed("spawned") == ahead.of(plain).printed("spawned")
    assert set(ran.printed("spawned")) == {0, 1}
    stepped = [r for r in ran.reports if isinstance(r, RoundClosed) and r.closed_by is ClosedBy.OPTIMIZER]
    assert sorted((r.rank, r.step) for r in stepped) == [(rank, step) for rank in (0, 1) for step in range(6)]
    assert ran.brief == []


def test_every_training_is_compared() -> None:
    """No training of the script is left out here."""
    functions = [n for n in ast.parse((SCRIPTS / "identical.py").read_text()).body if isinstance(n, ast.FunctionDef)]
    assert {f.name for f in functions if not f.name.startswith("_")} == set(TRAININGS)
