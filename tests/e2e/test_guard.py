"""The guard: a poisoned step is left out, or the training halted, on every rank at once; what is left out leaves no trace."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from training_run import SCRIPTS, Ahead, Case, Ran

from sentinel.bundle.merge import Merged
from sentinel.bundle.reader import Bundle
from sentinel.bundle.verify import verify
from sentinel.wire.messages import Guarded, RoundClosed

pytestmark = pytest.mark.e2e
WARM = True

SAME = ("ddp_adamw", "ddp_momentum", "fsdp2", "hybrid_sharding", "loop")
ALSO_SAME = ("two_optimizers",)
FLAGS = ("--sentinel-guard", "skip", "--sentinel-max-bundles", "20")
# All trainings in the same processes, one after another: two launches instead of many.
REFERENCE = Case("guarded.py", (*SAME, *ALSO_SAME), ranks=4, environ=(("LEFT_OUT", "1"),), watched=False)
SKIPPED = Case("guarded.py", (*SAME, *ALSO_SAME, "poisoned_buffers", "split_by_hand"), ranks=4, flags=FLAGS)
HALTS = [
    pytest.param(
        Case("guarded.py", (name,), ranks=4, flags=("--sentinel-guard", "halt", "--max-restarts", "3")), id=name
    )
    for name in ("ddp_adamw", "hybrid_sharding")
]
BUDGET = Case("guarded.py", ("always",), ranks=3, flags=("--sentinel-guard", "skip", "--sentinel-max-skips", "2"))
OFF = Case("guarded.py", ("one_agent_is_off",), flags=("--sentinel-guard", "skip"))
FAULT, RANKS = 7, 4


@pytest.mark.parametrize("training", [*SAME, *ALSO_SAME])
@pytest.mark.parametrize(("reference", "skipped"), [pytest.param(REFERENCE, SKIPPED, id="skip")])
def test_a_skipped_step_leaves_no_trace(ahead: Ahead, reference: Case, skipped: Case, training: str) -> None:
    """Parameters, buffers, optimizer state and their average end as if that one call had been left out of the script."""
    expected = ahead.of(reference).printed(training)
    assert set(expected) == set(range(RANKS)), ahead.of(reference).said
    assert ahead.of(skipped).printed(training) == expected, ahead.of(skipped).said


@pytest.mark.parametrize("case", [pytest.param(SKIPPED, id="skip")])
def test_every_rank_skips_the_same_rounds(ran: Ran) -> None:
    """One round of each training is skipped by all four ranks, the summary says how many, and no fault of ours is swallowed."""
    trainings = [*SAME, *ALSO_SAME, "poisoned_buffers"]
    skipped = [r for r in ran.reports if isinstance(r, RoundClosed) and r.guarded is Guarded.SKIPPED]
    rounds = sorted({r.round for r in skipped})
    assert [sum(r.round == number for r in skipped) for number in rounds] == [RANKS] * len(trainings), ran.said
    assert f"the guard left out {len(trainings)} steps with nonfinite gradients" in ran.stderr
    assert [i["guard"] for i in ran.incidents] == ["skipped"] * len(trainings) + ["undecided"], ran.said
    assert not ran.faults
    assert ran.exit_code == 0, ran.said


@pytest.mark.parametrize("case", [pytest.param(SKIPPED, id="skip")])
def test_poisoned_buffers_are_put_back(ran: Ran) -> None:
    """What a NaN sample did to BatchNorm's statistics is undone with the step: everything is finite in the end."""
    assert ran.printed("poisoned_buffers") == dict.fromkeys(range(RANKS), "True"), ran.said


@pytest.mark.parametrize("case", [pytest.param(SKIPPED, id="skip")])
def test_what_ranks_do_not_share_is_left_to_the_script(ran: Ran) -> None:
    """Ranks that average in groups of two know only their own group's result: the step is made everywhere, and that is said."""
    assert ran.printed("split_by_hand") == {0: "True", 1: "True", 2: "False", 3: "False"}, ran.said
    assert "the guard only observes here, the step is made: not every rank shares" in ran.stderr


@pytest.mark.parametrize("training", SAME)
@pytest.mark.parametrize("case", [pytest.param(SKIPPED, id="skip")])
def test_the_bundle_has_the_state_before_the_step(ran: Ran, training: str) -> None:
    """All four parts are committed, and their parameters are bit for bit those before step 7."""
    incident = ran.incidents[SAME.index(training)]
    bundle = ran.run_dir / incident["bundle"]
    assert [part.name for part in sorted(bundle.glob("rank-*"))] == [f"rank-{rank:05d}" for rank in range(RANKS)]
    assert verify(bundle) == []
    for rank, digest in ran.printed(f"before_{training}").items():
        assert parameters_digest(bundle / f"rank-{rank:05d}") == digest


def parameters_digest(part: Path) -> str:
    """SHA-256 of a part's parameters in the order of their names; BatchNorm's buffers, which lie beside them, left out."""
    header = json.loads((part / "part.json").read_text())
    assert header["state_after_step"] is False
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(part / "parameters.safetensors").items()):
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            digest.update(tensor.tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("training", ["fsdp2", "hybrid_sharding"])
@pytest.mark.parametrize("case", [pytest.param(SKIPPED, id="skip")])
def test_shards_can_be_put_together(ran: Ran, training: str, tmp_path: Path) -> None:
    """The four parts of a sharded training are one file with the whole parameters, as a single process has them."""
    bundle = ran.run_dir / ran.incidents[SAME.index(training)]["bundle"]
    Merged(Bundle.open(bundle)).write(tmp_path / "whole.safetensors")
    whole = load_file(tmp_path / "whole.safetensors")
    assert {name: array.shape for name, array in whole.items()} == {
        "0.weight": (32, 16),
        "0.bias": (32,),
        "3.weight": (4, 32),
        "3.bias": (4,),
    }
    pieces = [load_file(part / "parameters.safetensors")["0.weight"] for part in sorted(bundle.glob("rank-*"))]
    assert sum(piece.size for piece in pieces) == whole["0.weight"].size * (1 if training == "fsdp2" else 2)
    assert np.array_equal(whole["0.weight"][: len(pieces[0])], pieces[0])


@pytest.mark.parametrize("case", HALTS)
def test_halt_ends_every_rank_in_the_same_round(ran: Ran) -> None:
    """All ranks raise at step 7 once all four parts are written, nothing is restarted, and the exit code is 93."""
    assert ran.exit_code == 93, ran.said
    raised = [
        line for line in ran.stderr.splitlines() if "NonFiniteGradientError: gradients of step 7 are nonfinite" in line
    ]
    assert len(raised) == RANKS, ran.said
    assert all("no rank is still writing its part" in line for line in raised)
    (incident,) = ran.incidents
    assert (incident["step"], incident["guard"], incident["suspect_ranks"]) == (FAULT, "halted", [2])
    bundle = ran.run_dir / incident["bundle"]
    assert len(list(bundle.glob("rank-*"))) == RANKS
    assert verify(bundle) == []
    assert {r.attempt for r in ran.reports if isinstance(r, RoundClosed)} == {0}
    assert "exit code 93, not restarted" in ran.stderr


@pytest.mark.parametrize("case", [pytest.param(BUDGET, id="budget")])
def test_a_spent_budget_halts(ran: Ran) -> None:
    """Two steps in a row may be skipped; the third poisoned one halts, on every rank."""
    closed = [r for r in ran.reports if isinstance(r, RoundClosed) and r.guarded is not Guarded.NO]
    assert sorted({(r.step, r.guarded.value) for r in closed}) == [(7, "skipped"), (8, "skipped"), (9, "halted")]
    assert ran.exit_code == 93, ran.said


@pytest.mark.parametrize("case", [pytest.param(OFF, id="off")])
def test_an_agent_that_is_off_holds_nobody_up(ran: Ran) -> None:
    """A rank whose agent has switched itself off still takes part in the agreement on shards: the training ends."""
    assert ran.exit_code == 0, ran.said
    assert set(ran.printed("one_agent_is_off")) == {0, 1}
    assert "agent of rank 1 switched itself off" in ran.stderr
    assert ran.brief == [], ran.said


def test_every_training_is_run() -> None:
    """No training of the script is left out here."""
    tree = ast.parse((SCRIPTS / "guarded.py").read_text())
    trainings = {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}
    assert trainings - {"dist_group"} == {*SKIPPED.arguments, *BUDGET.arguments, *OFF.arguments}
