"""A replay's record as a page of text: the verdict first, then what proves it, then what to do.

Owns layout and order. The record is ``bundle/replayed.py``'s.
"""

from __future__ import annotations

from collections.abc import Iterator

from sentinel.bundle.replayed import BadOp, BatchFinding, OperandStatistics, ReplayRecord
from sentinel.postmortem.text import columns, labelled, number, printable

_WORDS = {
    "nonfinite": "nonfinite",
    "finite": "finite",
    "damaged_state": "nonfinite, but its state was damaged before the step",
    "not_run": "not tried",
    "failed": "could not be run",
}
_ENTRY = (
    "def replay_step(batch):                  # in the training script, beside its loop",
    "    model, loss_function = build()       # as the script makes them",
    "    return loss_function(model, batch)   # the loss of one micro-batch",
)


def describe_replay(record: ReplayRecord) -> str:
    """The whole page."""
    return "\n\n".join(block for block in _blocks(record) if block)


def _blocks(record: ReplayRecord) -> Iterator[str]:
    yield _headline(record)
    yield _op(record.first_bad_op) if record.first_bad_op is not None else ""
    yield columns(("PRECISION", "RESULT"), ((name, _WORDS[cell]) for name, cell in record.precision.items()))
    yield _list("Evidence", record.evidence)
    yield _list("Would refute it", record.refuted_by)
    yield _list("Odd in the batch", (_odd(one) for one in record.batch))
    yield _list("Lint", (f"{one['rule']} (line {one['line']}): {one['message']}. {one['fix']}" for one in record.lint))
    yield _list("Turned aside", record.diverted[:8])
    yield _list("Notes", record.notes)
    yield _list("Next", _next(record))


def _headline(record: ReplayRecord) -> str:
    said = "Reproduced" if record.reproduced else "Not reproduced"
    if record.verdict.startswith("not_replayed"):
        said = "Not replayed"
    title = f"{said}: step {record.step} of rank {record.rank}, bundle {printable(record.bundle)}, in {record.seconds:.1f} s"
    return f"{title}\n{printable(record.cause, 40)}: {printable(record.reason, 600)}"


def _op(op: BadOp) -> str:
    pairs = [("first bad op", f"{op.op} in {op.phase}" + (f", node {op.node}" if op.node else ""))]
    if op.what:
        pairs.append(("tensor", op.what))
    if op.module:
        pairs.append(("module", op.module))
    if op.line:
        pairs.append(("line", f"{op.line}  {op.code or ''}"))
    pairs += [(f"input {i}", _operand(one)) for i, one in enumerate(op.inputs)]
    pairs += [("output", _operand(one)) for one in op.outputs]
    if op.rows is not None:
        pairs.append(("rows", _rows(op.rows, op.batch_size)))
    return labelled(pairs)


def _operand(one: OperandStatistics) -> str:
    shape = " x ".join(map(str, one.shape)) or "scalar"
    counts = [f"{n} {word}" for n, word in ((one.nan, "NaN"), (one.posinf, "+inf"), (one.neginf, "-inf")) if n]
    counts += [f"{one.zeros} zeros"] if one.zeros else []
    spread = f"{number(one.minimum)} to {number(one.maximum)}" if one.minimum is not None else "nothing finite"
    return f"{one.dtype} {shape}: {spread}" + (f", {', '.join(counts)}" if counts else "")


def _rows(rows: tuple[int, ...], size: int | None) -> str:
    shown = ", ".join(map(str, rows[:16])) + (" …" if len(rows) > 16 else "")
    return f"{shown} (of {size})" if size else shown


def _odd(one: BatchFinding) -> str:
    where = f": samples {', '.join(map(str, one.samples))}" if one.samples else ""
    also = "; other ranks' batches show it too" if one.elsewhere else ""
    return f"{one.tensor}: {one.detail}{where}{also}"


def _list(title: str, lines: Iterator[str] | tuple[str, ...]) -> str:
    shown = [f"  {printable(line, 400)}" for line in lines]
    return "\n".join([title, *shown]) if shown else ""


def _next(record: ReplayRecord) -> tuple[str, ...]:
    if record.verdict.startswith("not_replayed"):
        return ("give the replay a function to call: sentinel replay BUNDLE --entry module:replay_step", *_ENTRY)
    return _NEXT.get(record.cause, _NEXT["unknown"])


_NEXT: dict[str, tuple[str, ...]] = {
    "data": (
        "look at the samples named above in the data set, and at what else is like them",
        "guard the operation as the lint says: such a sample will come again",
    ),
    "numerics": (
        "run this operation in float32 or bfloat16, or rescale its inputs",
        "sentinel lint SCRIPT finds other operations of its kind",
    ),
    "optimization": ("lower the learning rate, warm up, or clip; look at the loss of the rounds before",),
    "communication": (
        "average before the sum, or reduce in float32",
        "sentinel dump show BUNDLE lists every rank's gradients",
    ),
    "hardware": (
        "run the machine's memory and accelerator tests; look for the same rank in other incidents",
        "replay once more on another machine: a fault of the code would come back",
    ),
    "framework": ("look at how the tensor named above is initialised, and what is loaded into it",),
    "unknown": ("sentinel replay the bundle of the round in which it began, or try --precision and --anomaly",),
}
