"""What to do next, as commands to type: made from what a report has and what it still lacks.

Owns the list.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from sentinel.incidents.model import Cause
from sentinel.postmortem.report.facts import Facts


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do: why, and the command (empty if it is not one)."""

    why: str
    command: str = ""


def next_steps(facts: Facts) -> tuple[Step, ...]:
    """The next steps, most telling first."""
    return (*_proving(facts), *_repairing(facts), *_keeping(facts))


def _proving(facts: Facts) -> list[Step]:
    if facts.bundle is None:
        return [Step("No bundle was kept of this round, so it cannot be replayed.")]
    path = shlex.quote(str(facts.bundle.path))
    if facts.replays:
        return [Step("Look at every part in full", f"sentinel dump show {path}")]
    return [
        Step(
            "Prove the cause: replay the step, find the first bad operation and the samples", f"sentinel replay {path}"
        ),
        Step("Look at every part in full", f"sentinel dump show {path}"),
    ]


def _repairing(facts: Facts) -> list[Step]:
    steps = []
    if facts.lint:
        first = facts.lint[0]
        steps.append(
            Step(f"Line {first.line} of {first.path}: {first.fix}", f"sentinel lint {shlex.quote(facts.script)}")
        )
    replay = facts.replays[0] if facts.replays else None
    cause = replay.cause if replay else facts.incident.cause if facts.incident else None
    if cause == Cause.DATA and any(batch.sentences for batch in facts.batches):
        steps.append(
            Step("Look at the odd samples where they are stored, and decide whether to repair or to drop them.")
        )
    if cause == Cause.HARDWARE:
        steps.append(Step("Take the node out of the job and run its memory and compute diagnostics before it returns."))
    return steps


def _keeping(facts: Facts) -> list[Step]:
    if facts.incident is None or facts.run_dir is None:
        return []
    where = shlex.quote(str(facts.run_dir))
    return [
        Step(
            "Put it into a ticket", f"sentinel incidents export {facts.incident.id} --run-dir {where} --format markdown"
        )
    ]
