"""From a session that is over to what is told of it.

Owns the making of a TrialOutcome, and its file, through which a trial's process speaks to the one that started it.
"""

from __future__ import annotations

from pathlib import Path

from sentinel.bundle.replayed import BadOp, TrialOutcome
from sentinel_agent.replay.session import Session
from sentinel_agent.replay.taint import Event

OUTCOME_FILE = "outcome.json"
MAX_NAMES = 32
MAX_OTHER_OPS = 4


def outcome_of(session: Session, diverted: tuple[str, ...]) -> TrialOutcome:
    """What the recorded round did this time."""
    sinks = session.sinks
    sink, _ = sinks.first
    events = [event for event in sinks.causes if not event.is_constant] or list(sinks.causes)
    ops = [_with_batch(event, session) for event in events[: 1 + MAX_OTHER_OPS]]
    low = session.override.low_precision or session.tracer.low_precision
    return TrialOutcome(
        status="replayed",
        precision=session.trial.precision,
        nonfinite=sinks.nonfinite,
        sink=sink,
        loss=sinks.loss_value,
        loss_equal=_loss_equal(session),
        nonfinite_gradients=tuple(sinks.nonfinite_gradients)[:MAX_NAMES],
        gradients=sinks.compared() if session.trial.precision == "same" else (),
        first_bad_op=ops[0] if ops else None,
        other_ops=tuple(ops[1:]),
        inputs=session.feed.inputs,
        low_precision=low,
        batch_size=session.feed.batch_size,
        ops=session.tracer.ops,
        step_seconds=round(session.step_seconds, 4),
        stopped_at=session.stopped_at,
        diverted=diverted,
        gradient_hash=sinks.hash(),
        notes=tuple(dict.fromkeys([*session.notes, *session.feed.notes, *_weights_note(session)])),
    )


def write_outcome(outcome: TrialOutcome, scratch: Path) -> None:
    """Leave the outcome for the process that waits. Raises OSError."""
    (scratch / OUTCOME_FILE).write_text(outcome.model_dump_json())


def read_outcome(scratch: Path) -> TrialOutcome | None:
    """The outcome that a trial has left, None if it left none. Raises ValidationError."""
    path = scratch / OUTCOME_FILE
    return TrialOutcome.model_validate_json(path.read_text()) if path.exists() else None


def _with_batch(event: Event, session: Session) -> BadOp:
    """Rows are samples only where dimension 0 is the batch's."""
    found, size = event.found, session.feed.batch_size
    shape = (found.outputs or found.inputs)[0].shape if (found.outputs or found.inputs) else ()
    if size is None or not shape or shape[0] != size:
        return found.model_copy(update={"rows": None, "batch_size": size})
    return found.model_copy(update={"batch_size": size})


def _loss_equal(session: Session) -> bool | None:
    recorded, mine = session.recording.header.loss, session.sinks.loss_value
    scale = session.recording.header.loss_scale
    if recorded is None or mine is None or scale not in (None, 1.0):
        return None
    return recorded == mine or (recorded != recorded and mine != mine)


def _weights_note(session: Session) -> list[str]:
    recording = session.recording
    if not recording.weights:
        return ["the bundle has no weights of before the step: the script's own were used"]
    if recording.copies_differ:
        return ["weights are those of another rank, whose replica differed from this rank's own"]
    if recording.weights_are_of_another_rank:
        return ["this rank's part was written after the step: weights are those of another rank"]
    return []
