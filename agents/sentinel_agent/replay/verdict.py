"""From outcomes of trials to a verdict: a cause, a named reason, the evidence for it, and what would refute it.

Owns the rules; the first that matches decides. Pure: outcomes in, verdict out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sentinel.bundle.manifest import PartHeader
from sentinel.bundle.replayed import BadOp, Cause, Found, Precision, TrialOutcome
from sentinel_agent.replay.causes import Reading, base_of, headroom, read

FEW = 0.02  # share of a gradient's elements that a fault of the hardware may touch


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that the rules look at. ``together`` is the replay with the other ranks' contributions added; ``guilty`` are other
    ranks whose own replay is nonfinite.
    """

    header: PartHeader
    same: TrialOutcome
    again: TrialOutcome | None = None
    together: TrialOutcome | None = None
    guilty: tuple[int, ...] = ()
    precision: dict[Precision, Found] = field(default_factory=dict)
    recorded_nonfinite: bool = True
    samples: tuple[int, ...] = ()
    confirmed: bool | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the replay proves."""

    cause: Cause
    name: str
    reason: str
    evidence: tuple[str, ...] = ()
    refuted_by: tuple[str, ...] = ()


def judge(facts: Facts) -> Verdict:
    """The verdict of the first rule that matches."""
    for rule in RULES:
        verdict = rule(facts)
        if verdict is not None:
            return verdict
    return Verdict("unknown", "inconclusive", "the replay stayed finite, and nothing that was recorded tells why")


def found(outcome: TrialOutcome | None) -> Found:
    """One cell of the precision table."""
    if outcome is None:
        return "not_run"
    if outcome.status != "replayed":
        return "failed"
    if not outcome.nonfinite:
        return "finite"
    return "damaged_state" if _is_state(outcome.first_bad_op) else "nonfinite"


def _not_replayed(facts: Facts) -> Verdict | None:
    if facts.same.status == "replayed":
        return None
    return Verdict(
        "unknown", f"not_replayed_{facts.same.status}", f"the step could not be replayed: {facts.same.reason}"
    )


def _nothing(facts: Facts) -> Verdict | None:
    if facts.same.nonfinite or facts.recorded_nonfinite:
        return None
    evidence = ("nothing nonfinite was recorded on this rank", "nothing that counts became nonfinite in the replay")
    return Verdict(
        "unknown", "nothing_nonfinite", "nothing was wrong with this step, and nothing is in its replay", evidence
    )


def _state(facts: Facts) -> Verdict | None:
    op = facts.same.first_bad_op
    if not facts.same.nonfinite or op is None or not _is_state(op):
        return None
    first = facts.header.round == 0
    cause: Cause = "framework" if first else "unknown"
    where = "as the training began" if first else "before this step, so its origin is an earlier one"
    return Verdict(
        cause,
        "damaged_state",
        f"{op.what} was nonfinite {where}",
        (f"{op.what} holds nonfinite values in the bundle, which was written before the optimizer stepped",),
        (f"{op.what} finite in the bundle",),
    )


def _communication_path(facts: Facts) -> Verdict | None:
    """Every gradient was finite as autograd made it: what was sent became nonfinite on its way to the wire."""
    op = facts.same.first_bad_op
    if not facts.same.sink.startswith("reduction") or op is None:
        return None
    detail = headroom(op)
    return Verdict(
        "communication",
        "made_for_the_wire",
        f"gradients are finite; {base_of(op.op)} in the communication path makes them nonfinite" + _tail(detail),
        ("loss and every gradient were finite as autograd made them", f"{facts.same.sink} was given nonfinite values"),
        ("a nonfinite gradient before the communication path",),
    )


def _numerics(facts: Facts) -> Verdict | None:
    finite = [name for name in ("fp32", "bf16") if facts.precision.get(name) == "finite"]
    op = facts.same.first_bad_op
    if not facts.same.nonfinite or not finite or op is None:
        return None
    detail = headroom(op)
    dtype = op.outputs[0].dtype if op.outputs else "this precision"
    return Verdict(
        "numerics",
        "precision",
        f"{base_of(op.op)} is nonfinite in {dtype} and finite in {' and '.join(finite)}" + _tail(detail),
        (f"the same step in {finite[0]} is finite", *((detail,) if detail else ())),
        (f"the same step nonfinite in {finite[0]}",),
    )


def _reproduced(facts: Facts) -> Verdict | None:
    op = facts.same.first_bad_op
    if not facts.same.nonfinite:
        return None
    if op is None:
        return Verdict("unknown", "unlocated", f"{facts.same.sink} is nonfinite, but no op was seen to make it so")
    reading = read(op)
    tried = [name for name, cell in facts.precision.items() if cell == "nonfinite"]
    return Verdict(
        reading.cause,
        reading.name,
        reading.words + _samples(facts, reading),
        (f"nonfinite in every precision that was tried: {', '.join(tried)}", *_confirmation(facts)),
        _refutation(reading),
    )


def _innocent(facts: Facts) -> Verdict | None:
    if not facts.guilty or facts.same.nonfinite:
        return None
    ranks = ", ".join(map(str, facts.guilty))
    return Verdict(
        "unknown",
        "another_rank",
        f"this rank's own step is finite; rank {ranks} made what it was given: replay that rank",
        ("loss and gradients of this rank are finite", f"the replay of rank {ranks} is nonfinite"),
        ("a nonfinite gradient of this rank before the reduction",),
    )


def _reduction(facts: Facts) -> Verdict | None:
    if facts.together is None or not facts.together.nonfinite:
        return None
    op = facts.together.first_bad_op
    dtype = op.outputs[0].dtype if op is not None and op.outputs else "the wire's dtype"
    return Verdict(
        "communication",
        "reduction_overflow",
        f"every rank's own gradients are finite; their sum is not, in {dtype}",
        (
            "this rank's step alone is finite",
            f"with the recomputed contributions of the other ranks added, {facts.together.sink} is nonfinite",
        ),
        ("a nonfinite contribution of any single rank",),
    )


def _transient(facts: Facts) -> Verdict | None:
    compared = facts.same.gradients
    if facts.same.nonfinite or not compared:
        return None
    if facts.again is not None and facts.again.gradient_hash != facts.same.gradient_hash:
        return Verdict(
            "unknown",
            "nondeterministic",
            "two replays of the same step differ in their bits: no comparison can prove anything",
        )
    total = sum(one.elements for one in compared)
    different = sum(one.different for one in compared)
    if different > max(1, FEW * total):
        return Verdict(
            "unknown",
            "not_faithful",
            f"the replay is finite, but {different} of {total} recorded elements differ: it did not run the same step",
        )
    names = ", ".join(f"{one.name} ({one.different} of {one.elements})" for one in compared if one.different)
    return Verdict(
        "hardware",
        "transient",
        f"not reproduced: all but {different} of {total} recorded gradient elements came back bit by bit: a transient fault",
        (
            f"elements that differ: {names}",
            "two replays of the step agree with each other bit by bit",
            *_equal_loss(facts),
        ),
        ("the same step nonfinite in a replay on this or another machine", "replays that differ from each other"),
    )


Rule = Callable[[Facts], Verdict | None]
RULES: tuple[Rule, ...] = (
    _not_replayed,
    _nothing,
    _state,
    _communication_path,
    _numerics,
    _reproduced,
    _innocent,
    _reduction,
    _transient,
)


def _is_state(op: BadOp | None) -> bool:
    return op is not None and op.kind == "arrived" and (op.what or "").startswith(("parameter", "buffer"))


def _tail(detail: str) -> str:
    return f": {detail}" if detail else ""


def _samples(facts: Facts, reading: Reading) -> str:
    if not facts.samples or reading.cause not in ("data", "numerics"):
        return ""
    one = len(facts.samples) == 1
    return (
        f"; sample{'' if one else 's'} {', '.join(map(str, facts.samples))} of the batch {'does' if one else 'do'} it"
    )


def _confirmation(facts: Facts) -> tuple[str, ...]:
    if not facts.samples or facts.confirmed is None:
        return ()
    shown = ", ".join(map(str, facts.samples))
    if facts.confirmed:
        return (f"with sample {shown} replaced by a good one the same step is finite",)
    return (f"with sample {shown} replaced by a good one the same step is still nonfinite",)


def _equal_loss(facts: Facts) -> tuple[str, ...]:
    return ("the loss is the recorded one, bit by bit",) if facts.same.loss_equal else ()


def _refutation(reading: Reading) -> tuple[str, ...]:
    if reading.cause == "data":
        return ("the same fault with another batch", "a finite step with this batch and another model state")
    if reading.cause == "optimization":
        return ("the same magnitudes at the start of the training",)
    return ("a finite result of the same op on the same inputs",)
