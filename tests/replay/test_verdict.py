"""Verdicts from outcomes: each rule once, as a table, and that every verdict says what would refute it."""

from __future__ import annotations

from typing import Any

import pytest

from sentinel.bundle.manifest import Environment, PartHeader
from sentinel.bundle.replayed import BadOp, GradientComparison, OperandStatistics, TrialOutcome
from sentinel_agent.replay.causes import headroom, read
from sentinel_agent.replay.verdict import RULES, Facts, found, judge


def header(**changes: Any) -> PartHeader:
    """Rank 1's part of round 3."""
    where = Environment(argv=("x.py",), cwd="/", python="3", torch="2", host="h", pid=1)
    fields: dict[str, Any] = {
        "run_id": "r",
        "attempt": 0,
        "rank": 1,
        "world_size": 2,
        "node": 0,
        "round": 3,
        "step": 3,
        "state_after_step": False,
        "reason": "a test",
        "written_at": 0.0,
        "environment": where,
    }
    return PartHeader(**(fields | changes))


def operand(**changes: Any) -> OperandStatistics:
    """A finite float32 operand."""
    fields: dict[str, Any] = {"dtype": "float32", "shape": (4,), "minimum": -1.0, "maximum": 1.0}
    return OperandStatistics(**(fields | changes))


def op(name: str, *inputs: OperandStatistics, **changes: Any) -> BadOp:
    """A bad op made in forward."""
    fields: dict[str, Any] = {"op": f"aten.{name}.default", "kind": "created", "phase": "forward", "inputs": inputs}
    return BadOp(**(fields | {"outputs": (operand(nan=1),)} | changes))


def bad(first: BadOp | None = None, **changes: Any) -> TrialOutcome:
    """A trial that reproduced the fault."""
    fields: dict[str, Any] = {"status": "replayed", "nonfinite": True, "sink": "loss", "first_bad_op": first}
    return TrialOutcome(**(fields | changes))


FINITE = TrialOutcome(status="replayed", gradient_hash="a")
INF16 = (OperandStatistics(dtype="float16", shape=(4,), posinf=2),)
PARAMETER = op("arrived", kind="arrived", what="parameter 2.g")


def compared(different: int) -> TrialOutcome:
    """A finite trial, 512 recorded elements of which some differ."""
    gradients = (GradientComparison(name="w", elements=512, different=different),)
    return FINITE.model_copy(update={"gradients": gradients})


CASES: dict[str, tuple[Facts, str, str]] = {
    "raised": (
        Facts(header=header(), same=TrialOutcome(status="script_raised", reason="ValueError: x")),
        "unknown",
        "not_replayed_script_raised",
    ),
    "healthy": (Facts(header=header(), same=FINITE, recorded_nonfinite=False), "unknown", "nothing_nonfinite"),
    "born broken": (Facts(header=header(round=0), same=bad(PARAMETER)), "framework", "damaged_state"),
    "broken before": (Facts(header=header(), same=bad(PARAMETER)), "unknown", "damaged_state"),
    "cast for the wire": (
        Facts(header=header(), same=bad(op("_to_copy", outputs=INF16), sink="reduction 0 (allreduce_)")),
        "communication",
        "made_for_the_wire",
    ),
    "half": (
        Facts(header=header(), same=bad(op("addmm", outputs=INF16)), precision={"same": "nonfinite", "fp32": "finite"}),
        "numerics",
        "precision",
    ),
    "zero variance": (
        Facts(header=header(), same=bad(op("div", operand(), operand(zeros=1))), samples=(5,), confirmed=True),
        "data",
        "division_by_zero",
    ),
    "trained divisor": (
        Facts(header=header(), same=bad(op("div", operand(), operand(zeros=1, trained=True)))),
        "numerics",
        "division_by_zero",
    ),
    "log of a softmax": (
        Facts(header=header(), same=bad(op("log", operand(zeros=3, trained=True)))),
        "numerics",
        "log_of_zero",
    ),
    "derivative": (
        Facts(header=header(), same=bad(op("div", operand(), phase="backward", node="SqrtBackward0"))),
        "numerics",
        "derivative",
    ),
    "run away": (
        Facts(header=header(), same=bad(op("mse_loss", operand(maximum=1e19), outputs=(operand(posinf=1),)))),
        "optimization",
        "growth",
    ),
    "sum overflow": (
        Facts(header=header(), same=FINITE, together=bad(op("allreduce_", outputs=INF16))),
        "communication",
        "reduction_overflow",
    ),
    "innocent": (Facts(header=header(), same=FINITE, guilty=(0,)), "unknown", "another_rank"),
    "bit flip": (Facts(header=header(), same=compared(1), again=FINITE), "hardware", "transient"),
    "noise": (
        Facts(header=header(), same=compared(1), again=FINITE.model_copy(update={"gradient_hash": "b"})),
        "unknown",
        "nondeterministic",
    ),
    "another step": (Facts(header=header(), same=compared(300), again=FINITE), "unknown", "not_faithful"),
    "no reason": (Facts(header=header(), same=FINITE), "unknown", "inconclusive"),
}


@pytest.mark.parametrize("name", CASES)
def test_verdict(name: str) -> None:
    """Each set of outcomes has its cause and its named reason."""
    facts, cause, reason = CASES[name]
    verdict = judge(facts)
    assert (verdict.cause, verdict.name) == (cause, reason)
    assert verdict.reason
    assert "\n" not in verdict.reason


def test_every_cause_says_what_would_refute_it() -> None:
    """A verdict that names a cause comes with evidence, and with what would prove it wrong."""
    for facts, cause, _ in CASES.values():
        verdict = judge(facts)
        if cause not in ("unknown",):
            assert verdict.evidence
            assert verdict.refuted_by


def test_every_rule_decides_some_case() -> None:
    """No rule is without a case in this table."""
    deciding = {next((r for r in RULES if r(facts) is not None), None) for facts, _, _ in CASES.values()}
    assert deciding == {*RULES, None}


def test_samples_are_told_with_the_verdict() -> None:
    """A data verdict names the samples, and the replacement that confirmed them."""
    verdict = judge(CASES["zero variance"][0])
    assert verdict.reason.endswith("sample 5 of the batch does it")
    assert "with sample 5 replaced by a good one the same step is finite" in verdict.evidence


@pytest.mark.parametrize(
    ("outcome", "cell"),
    [
        (None, "not_run"),
        (TrialOutcome(status="timed_out"), "failed"),
        (FINITE, "finite"),
        (bad(op("log")), "nonfinite"),
        (bad(PARAMETER), "damaged_state"),
    ],
)
def test_precision_cells(outcome: TrialOutcome | None, cell: str) -> None:
    """The precision table keeps apart what is finite, what was not run, and what was lost before the step."""
    assert found(outcome) == cell


def test_headroom_names_value_and_limit() -> None:
    """An overflow says how large the operands were and what the dtype holds."""
    overflow = op("mul", operand(dtype="float16", maximum=7168.0), outputs=INF16)
    assert headroom(overflow) == "inputs reach 7168 and float16 holds 65504 at most"
    assert headroom(op("log")) == ""


@pytest.mark.parametrize(
    ("bad_op", "cause"),
    [
        (op("nll_loss_forward", operand(trained=True)), "data"),
        (op("std", operand(shape=(1,))), "data"),
        (op("_softmax", kind="escalated"), "data"),
        (op("arrived", kind="arrived", what="tensor 0 of the batch"), "data"),
        (op("acos", operand(maximum=2.0)), "data"),
        (op("mul", operand(dtype="float16", maximum=7168.0), outputs=INF16), "numerics"),
        (op("acos", operand(maximum=2.0, trained=True)), "numerics"),
    ],
)
def test_causes_from_operands(bad_op: BadOp, cause: str) -> None:
    """What only depends on the batch is the batch's fault; what depends on parameters is arithmetic's."""
    assert read(bad_op).cause == cause
