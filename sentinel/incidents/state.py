"""Rules about what the training keeps: parameters and buffers that are nonfinite at the start, after a step, or after a forward.

Owns rules 2, 12 and 13; who handed his state to the others is ``blame.py``'s to say.
"""

from __future__ import annotations

from sentinel.incidents import blame
from sentinel.incidents.describe import rank_list
from sentinel.incidents.model import Cause, Kind, Stage, Verdict
from sentinel.incidents.verdicts import names_of, ranks_of, verdict_on
from sentinel.incidents.view import View
from sentinel.wire.messages import AT_START, HANDED, WRITTEN, Evidence, Phase


def parameters_at_start(view: View) -> Verdict | None:
    """Rule 2: parameters were nonfinite before the first forward (echoes of an earlier incident never reach the rules)."""
    seen = view.window.of_phase(Phase.INIT)
    if not seen:
        return None
    return verdict_on(
        view,
        "parameters_at_start",
        Kind.NONFINITE_PARAMETERS,
        Stage.INIT_WEIGHTS,
        seen,
        Cause.FRAMEWORK,
        f"{names_of(seen)} nonfinite before the first forward on {rank_list(ranks_of(seen))}: "
        "uninitialised memory, or a broken checkpoint" + _handed(view, seen),
        suspects=blame.state_origins(view.window, ranks_of(seen)),
    )


def buffers_at_start(view: View) -> Verdict | None:
    """Rule 2, of buffers: they held NaN before the first forward, and its loss or gradients were nonfinite."""
    seen = [e for e in view.window.of_phase(Phase.BUFFERS) if e.note in (AT_START, HANDED)]
    if not seen:
        return None
    return verdict_on(
        view,
        "buffers_at_start",
        Kind.NONFINITE_BUFFERS,
        Stage.INIT_WEIGHTS,
        seen,
        Cause.FRAMEWORK,
        f"buffers held NaN before the first forward on {rank_list(ranks_of(seen))} ({names_of(seen)}), and what was "
        "computed with them is nonfinite: uninitialised memory, or a broken checkpoint" + _handed(view, seen),
        suspects=blame.state_origins(view.window, ranks_of(seen)),
    )


def parameters_written(view: View) -> Verdict | None:
    """Rule 2: parameters nonfinite at a round's start that somebody but the optimizer has written since the last step."""
    seen = view.window.of_phase(Phase.PARAMS)
    if not seen or not all(e.note == WRITTEN for e in seen):
        return None
    return verdict_on(
        view,
        "parameters_written",
        Kind.NONFINITE_PARAMETERS,
        Stage.PARAMS,
        seen,
        Cause.FRAMEWORK,
        f"{names_of(seen)} nonfinite at the start of this round on {rank_list(ranks_of(seen))}, and not by the optimizer: "
        "something else has written them since its last step (a checkpoint that was loaded?)" + _handed(view, seen),
        suspects=blame.state_origins(view.window, ranks_of(seen)),
    )


def parameters_after_step(view: View) -> Verdict | None:
    """Rules 2 and 12: parameters nonfinite at a round's start with no earlier incident: the last step, or a load, made them so."""
    seen = view.window.of_phase(Phase.PARAMS)
    if not seen:
        return None
    return verdict_on(
        view,
        "parameters_after_step",
        Kind.NONFINITE_PARAMETERS,
        Stage.OPTIMIZER if view.window.round > 0 else Stage.PARAMS,
        seen,
        Cause.OPTIMIZATION,
        (
            f"{names_of(seen)} nonfinite on {rank_list(ranks_of(seen))} after the step, though its gradients were finite"
            if view.window.round
            else f"{names_of(seen)} nonfinite at the start of this round on {rank_list(ranks_of(seen))}"
        )
        + _handed(view, seen),
        suspects=blame.state_origins(view.window, ranks_of(seen)),
    )


def buffers(view: View) -> Verdict | None:
    """Rule 13: BatchNorm statistics or other buffers became nonfinite, while losses and gradients did not."""
    seen = view.window.of_phase(Phase.BUFFERS)
    if not seen:
        return None
    return verdict_on(
        view,
        "buffers",
        Kind.NONFINITE_BUFFERS,
        Stage.FORWARD,
        seen,
        Cause.DATA,
        f"buffers of {rank_list(ranks_of(seen))} became nonfinite in this round's forward ({names_of(seen)}), "
        "though loss and gradients stayed finite: what is computed with them, evaluation above all, cannot be relied on"
        + _handed(view, seen),
        suspects=blame.state_origins(view.window, ranks_of(seen)),
    )


def _handed(view: View, seen: list[Evidence]) -> str:
    ranks = ranks_of(seen)
    origins = blame.state_origins(view.window, ranks)
    return f"; {rank_list(origins)} handed them to the others" if origins != ranks else ""
