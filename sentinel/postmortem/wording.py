"""A verdict in sentences: what happened, whose fault it is, and what that means for someone who meets it first here.

Owns the words for every kind, stage, attribution and cause. Decides nothing: the verdict is the incident's.
"""

from __future__ import annotations

from sentinel.incidents.describe import rank_list
from sentinel.incidents.model import Attribution, Cause, Incident, Kind, Stage
from sentinel.wire.messages import ANOMALY, Guarded

KIND_WORDS: dict[Kind, str] = {
    Kind.NONFINITE_GRADIENT: "gradients became nonfinite",
    Kind.NONFINITE_LOSS: "the loss became nonfinite",
    Kind.NONFINITE_PARAMETERS: "parameters are nonfinite",
    Kind.NONFINITE_BUFFERS: "buffers are nonfinite",
    Kind.BAD_REDUCTION: "a reduction did not return what its inputs add up to",
    Kind.REPLICA_DIVERGENCE: "the replicas' weights differ",
    Kind.STEP_DISAGREEMENT: "some ranks stepped and others skipped",
    Kind.SCALER_COLLAPSE: "the loss scale collapsed",
    Kind.STALLED_TRAINING: "training goes on without changing the weights",
    Kind.SILENT_OVERFLOW: "an intermediate overflowed and was absorbed",
    Kind.MISUSE: "calls are in the wrong order",
    Kind.RANK_SILENT: "a rank stopped reporting",
}

STAGE_WORDS: dict[Stage, str] = {
    Stage.INIT_WEIGHTS: "before the first forward",
    Stage.PARAMS: "at the start of the round",
    Stage.FORWARD: "in the forward",
    Stage.PRE_REDUCE: "before the reduction",
    Stage.WIRE_CAST: "in the cast to the dtype on the wire",
    Stage.BETWEEN_COLLECTIVES: "between two collectives of one gradient synchronisation",
    Stage.POST_REDUCE: "in the reduction",
    Stage.NOT_REDUCED: "in gradients that no reduction covers",
    Stage.OPTIMIZER: "in the optimizer step",
    Stage.NONE: "nothing is wrong with a value",
}

CAUSE_WORDS: dict[Cause, str] = {
    Cause.DATA: "the data",
    Cause.NUMERICS: "the numerics (precision, range, an unsafe operation)",
    Cause.OPTIMIZATION: "the optimization (learning rate, clipping, loss scale)",
    Cause.COMMUNICATION: "the communication",
    Cause.HARDWARE: "the hardware",
    Cause.FRAMEWORK: "the framework, or how it is called",
    Cause.UNKNOWN: "not known yet",
}


GUARD_WORDS: dict[Guarded, str] = {
    Guarded.NO: "nothing was done",
    Guarded.SKIPPED: "the step was left out on every rank; nothing was applied to the parameters",
    Guarded.HALTED: "training was ended on every rank; nothing was applied to the parameters",
    Guarded.UNDECIDED: "the step was made: not every rank could know of the fault",
}


def verdict_sentence(incident: Incident) -> str:
    """One sentence: when, what, where in the step, on which ranks."""
    if incident.kind is Kind.RANK_SILENT:
        return (
            f"At step {incident.step}, {rank_list(incident.suspect_ranks)} stopped: nothing more was heard from there."
        )
    where = f" on {rank_list(incident.suspect_ranks)}" if incident.suspect_ranks else ""
    return f"At step {incident.step}, {KIND_WORDS[incident.kind]}{where}, {_stage(incident)}."


def attribution_sentence(incident: Incident) -> str:
    """Whose fault it is, and whose it is not."""
    who = rank_list(incident.suspect_ranks)
    if incident.kind is Kind.RANK_SILENT:
        return f"The others wait for {who}, in their next collective at the latest."
    if incident.attribution is Attribution.RANK_LOCAL:
        return f"Rank-local: {who} made it{_before_reduction(incident)}."
    if incident.attribution is Attribution.MULTI_RANK:
        return f"Several ranks: {who} made it{_before_reduction(incident)}."
    if incident.attribution is Attribution.ALL_RANKS:
        return "All ranks alike: look at what they share (weights, loss scale, learning rate, code), not at one rank's data."
    if incident.attribution is Attribution.REDUCTION_INDUCED:
        return "The reduction: what every rank put in was finite, and the sum of it was not. No rank is at fault."
    return (
        f"No single rank can be named; {who} concerned." if incident.suspect_ranks else "No single rank can be named."
    )


def _before_reduction(incident: Incident) -> str:
    if incident.stage is Stage.PRE_REDUCE:
        if any(f.note.startswith(ANOMALY) for f in incident.findings):
            return " in its own backward, which torch's anomaly mode ended before any reduction"
        named = [f for f in incident.findings if f.parameters and f.phase in ("raw", "wire")]
        if any(f.rank not in incident.suspect_ranks for f in named):
            return " itself; the other ranks got it from there, by what ranks hand each other besides gradients"
        if named and all(f.op is None for f in named):
            return " itself, and no reduction was there to spread it; the other ranks' own gradients were finite"
        return " before the reduction, which then only spread it; the other ranks' own gradients were finite"
    return f" {_stage(incident)}"


def _stage(incident: Incident) -> str:
    return "after the reduction" if incident.rule == "rewritten_gradient" else STAGE_WORDS[incident.stage]
