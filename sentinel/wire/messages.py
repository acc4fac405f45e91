"""The contract of agents and coordinator: every message that crosses a process boundary.

Owns shapes and meaning of the messages. Framing and versions are in ``codec.py``; what a message means for a verdict is in
``sentinel/incidents``. All structs are array-like msgpack: fields may only be appended, and a change raises ``PROTOCOL``.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Phase(StrEnum):
    """Where on a value's way the evidence was seen (DESIGN words; ``raw`` -> ``wire`` -> ``reduced``)."""

    INIT = "init"  # parameters or buffers before the first forward
    PARAMS = "params"  # parameters at the start of a later round
    BUFFERS = "buffers"  # buffers (BatchNorm statistics, ...) at the start of a round
    LOSS = "loss"  # the tensor backward was called on, or a scalar found in a dying frame
    OUTPUT = "output"  # the root module's output
    RAW = "raw"  # autograd's gradient, before any cast or compression
    WIRE = "wire"  # what a collective was given
    REDUCED = "reduced"  # what a collective returned
    CLIP = (
        "clip"  # the norm that gradient clipping computed, or squares that an optimizer did: inf for finite gradients
    )
    AUDIT = "audit"  # an intermediate of the forward, in audited rounds; ``note`` names op, dtype and line
    MISUSE = "misuse"  # calls in an order that scales, clips or steps wrongly; ``note`` names which
    APPLIED = (
        "applied"  # gradients as the optimizer was about to apply them; looked at only in rounds with other evidence
    )
    EXIT = "exit"  # the rank raised or left while its round was open


AT_START = "before the first forward"
"""Note of BUFFERS evidence in round 0: buffers that held NaN when the training began."""

HANDED = "handed round before the first forward"
"""Note of INIT and BUFFERS evidence in round 0: another rank handed this one its state, and what it held until then was finite."""

CHAINED = "by what a communication hook made of an earlier result"
"""Note of WIRE evidence: the collective was issued once another one of the same hook was done, and was given what came of it."""

ANOMALY = "anomaly mode stopped at "
"""Begins the note of RAW evidence that torch's anomaly mode gave: what follows is the operator whose backward made NaN."""

LATE = "looked at once it had been written"
"""Note of REDUCED evidence: whoever waited for the result was faster than the look at it, and may have made it nonfinite."""

REWRITTEN = "written since they were reduced"
"""Note of APPLIED evidence: gradients were finite when they were reduced, and somebody has written them since."""

SECOND_MOMENT = "of an optimizer's squared gradients"
"""Note of CLIP evidence: finite gradients were applied, and the optimizer's second moment of them is inf."""

WRITTEN = "written since the last step"
"""Note of PARAMS evidence: somebody but the optimizer has written the parameters that were found nonfinite."""


class Role(StrEnum):
    """Whose reduction it is; only gradients make gradient faults."""

    GRADIENT = "gradient"  # layout equals parameter gradients (bucket, flat shard, coalesced list, one tensor)
    DERIVED = "derived"  # after backward, computed from gradients (compression factors, partial sums)
    ACTIVATION = "activation"  # during forward or backward, not a gradient (SyncBatchNorm, tensor parallel)
    SCALAR = "scalar"  # one element, integers, float64: norms, flags, losses


class ClosedBy(StrEnum):
    """What closed a round (the clock of DESIGN.md section 3)."""

    OPTIMIZER = "optimizer"  # optimizer.step ran
    SCALER_SKIP = "scaler_skip"  # GradScaler.step left the optimizer out
    FRAMEWORK_SKIPPED = "framework_skipped"  # gradients were cleared with no step: a user's `if`, or a framework
    EXIT = "exit"  # the process ended, by itself or by an exception or a signal
    JOINED = "joined"  # the rank has no input left and shadows the others' reductions


class Guarded(StrEnum):
    """What the guard did about the optimizer's step of a round."""

    NO = "no"  # nothing: it had no reason, or is told to observe
    SKIPPED = "skipped"  # the step was made a no-op, on every rank
    HALTED = "halted"  # training ends here, on every rank
    UNDECIDED = "undecided"  # there was reason, but not every rank can know of it: the step was made


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Base of all messages: immutable, positional on the wire, unknown fields refused."""


class Check(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What one pass over a tensor found.

    ``absmax`` is the largest magnitude among the *finite* elements (0.0 if there are none); for large tensors with nothing
    nonfinite it may be an upper bound, their L2 norm. ``nan`` and ``inf`` are exact counts of elements.
    """

    numel: int
    nan: int
    inf: int
    absmax: float

    @property
    def nonfinite(self) -> bool:
        """True if any element is NaN or infinite."""
        return self.nan > 0 or self.inf > 0


class Collective(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One reduction as one rank saw it.

    ``index`` counts this rank's checked collectives of the group within the round, so the k-th on one rank pairs with the
    k-th on another. ``ranks`` are global ranks, none standing for
    the whole world. ``raw`` is the largest finding over the parameter gradients that feed it,
    None if nobody could look. ``narrowed`` is True when the wire's dtype is narrower than the gradients' own.
    """

    group: str
    ranks: tuple[int, ...]
    index: int
    op: str
    reduce_op: str
    dtype: str
    role: Role
    wire: Check
    reduced: Check | None = None
    raw: Check | None = None
    narrowed: bool = False


class Hello(_Message, frozen=True, array_like=True, tag="hello", forbid_unknown_fields=True):
    """A rank's agent is up."""

    attempt: int
    rank: int
    local_rank: int
    node: int
    world_size: int
    pid: int
    host: str
    agent_version: str
    torch_version: str
    at: float  # unix seconds


class Evidence(_Message, frozen=True, array_like=True, tag="evidence", forbid_unknown_fields=True):
    """Something nonfinite, sent the moment it is latched; the verdict waits for the round.

    ``order`` numbers a rank's evidence in the order it was met. ``step`` is what is known before the round closes; where there is a
    RoundClosed, its step rules. ``parameters`` are fully qualified names, at most 32 of
    ``parameters_total``. ``value`` is the loss, unscaled, where the phase is ``loss``.
    """

    attempt: int
    rank: int
    round: int
    step: int
    order: int
    phase: Phase
    at: float
    check: Check
    parameters: tuple[str, ...] = ()
    parameters_total: int = 0
    collective: Collective | None = None
    value: float | None = None
    note: str = ""


class GroupSync(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The gradient reductions of one process group in one round, as one rank saw them, small enough to send every round.

    ``ranks`` (none: the whole world) come only with the first round that uses the group. ``identity`` combines op, dtype, size
    and, where known, parameter of each collective in order. ``fingerprint`` combines the bits of the all-reduces' results that
    had their turn; ``norm`` is the L2 norm of all of them (a float sum: equal only within rounding). ``audited`` is the index of
    the collective whose sums are in ``sum_in`` and ``sum_out`` (of its input and result), -1 for none. ``foreign`` counts
    contributions of a hand-written loop that were no parameter's gradient.
    """

    group: str
    ranks: tuple[int, ...]
    size: int
    collectives: int
    identity: int
    fingerprint: int
    norm: float = 0.0
    audited: int = -1
    sum_in: float = 0.0
    sum_out: float = 0.0
    audited_numel: int = 0
    audited_absmax: float = 0.0
    audited_op: str = ""
    audited_dtype: str = ""
    foreign: int = 0


class Weights(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Fingerprint of parameters at a round's start, before its step: those reduced over ``group``, or ``UNREDUCED`` ones."""

    group: str
    fingerprint: int
    parameters: int


UNREDUCED = "!"
"""Stands for a group in ``Weights``: the parameters that had gradients which no collective reduced."""


class RoundClosed(_Message, frozen=True, array_like=True, tag="round", forbid_unknown_fields=True):
    """The one small record of a healthy round, and the end of an unhealthy one.

    ``evidence`` is how many Evidence messages this rank sent for the round, so a loss on the
    way is noticed. ``params_nonfinite``: parameters were already nonfinite before this round's step (None: not looked at).
    ``gradient_absmax`` is the largest magnitude that any gradient collective was given (None: there was none). ``unreduced`` names
    at most 32 of the ``unreduced_total`` parameters whose gradients, or part of them, no collective reduced. ``weights`` come in
    rounds 0, 1, 2, 4, 8, … and every 64th.
    """

    attempt: int
    rank: int
    round: int
    step: int
    closed_by: ClosedBy
    at: float
    evidence: int
    checks: int
    loss: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    params_nonfinite: bool | None = None
    buffers_nonfinite: bool | None = None
    check_seconds: float = 0.0
    backwards: int = 0
    forwards: int = 0  # outermost ones, with gradients
    activations: int = 0
    gradient_absmax: float | None = None
    sync: tuple[GroupSync, ...] = ()
    unreduced: tuple[str, ...] = ()
    unreduced_total: int = 0
    weights: tuple[Weights, ...] = ()
    guarded: Guarded = Guarded.NO
    float16_absmax: float | None = None  # gradient_absmax of reductions in float16 alone (None: there was none)
    layer: str = (
        ""  # whose gradient norm has grown most over its own usual one, ``layer_growth`` times (None: not known)
    )
    layer_growth: float | None = None


class PartWritten(_Message, frozen=True, array_like=True, tag="part", forbid_unknown_fields=True):
    """This rank's part of a bundle is on disk (or could not be: then ``error`` says why in one line)."""

    attempt: int
    rank: int
    round: int
    step: int
    node: int
    directory: str  # absolute path of the part
    bytes: int
    seconds: float
    error: str = ""


class Counted(_Message, frozen=True, array_like=True, tag="counted", forbid_unknown_fields=True):
    """Totals of what this process dropped, skipped or swallowed, by named reason (counts since its start)."""

    attempt: int
    rank: int  # -1: the relay of ``node``
    node: int
    drops: dict[str, int]
    faults: dict[str, int]


class Alive(_Message, frozen=True, array_like=True, tag="alive", forbid_unknown_fields=True):
    """Nothing else was sent for a while: the rank's process is there all the same."""

    attempt: int
    rank: int


class Disabled(_Message, frozen=True, array_like=True, tag="disabled", forbid_unknown_fields=True):
    """The agent switched itself off after a fault of its own; training goes on unwatched on this rank."""

    attempt: int
    rank: int
    reason: str


class Goodbye(_Message, frozen=True, array_like=True, tag="goodbye", forbid_unknown_fields=True):
    """This rank's process is ending in order; it waits a moment for ``Released``. ``clean`` is False after an exception."""

    attempt: int
    rank: int
    last_round: int  # last closed round, -1 if none
    clean: bool
    reason: str = ""


class NodeEnded(_Message, frozen=True, array_like=True, tag="node_ended", forbid_unknown_fields=True):
    """The launcher of a node says that its processes of this attempt are gone: no more reports will come from them."""

    attempt: int
    node: int
    exit_code: int


Report = Hello | Evidence | RoundClosed | PartWritten | Counted | Alive | Disabled | Goodbye | NodeEnded


class DumpRequest(_Message, frozen=True, array_like=True, tag="dump", forbid_unknown_fields=True):
    """Ask ranks to write their part of round ``round`` from their window. Empty ``ranks`` means all."""

    command_id: str
    expires_at: float  # unix seconds
    attempt: int
    round: int
    ranks: tuple[int, ...] = ()


class Released(_Message, frozen=True, array_like=True, tag="released", forbid_unknown_fields=True):
    """Answer to Goodbye: every round this rank took part in has been judged."""

    command_id: str
    expires_at: float
    attempt: int
    ranks: tuple[int, ...] = ()


class PartWanted(_Message, frozen=True, array_like=True, tag="part_wanted", forbid_unknown_fields=True):
    """Ask the relay beside a rank for a piece of the part it wrote: ``length`` bytes of ``file`` from ``offset``.

    ``ranks`` holds the one rank. An empty ``file`` asks which files the part has. Relays answer with a ``PartPiece``, but not if
    the part is ``done`` with: nothing more of it will be asked for. Ranks never see this.
    """

    command_id: str
    expires_at: float
    attempt: int
    round: int
    ranks: tuple[int, ...]
    file: str = ""
    offset: int = 0
    length: int = 0
    done: bool = False


class PartFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A file of a part, and its size."""

    name: str
    bytes: int


class PartPiece(_Message, frozen=True, array_like=True, tag="piece", forbid_unknown_fields=True):
    """A relay's answer to PartWanted: ``content`` of ``file`` from ``offset``, or (no ``file``) all its ``files``.

    ``error`` says in one line why there is neither.
    """

    attempt: int
    round: int
    rank: int
    file: str = ""
    offset: int = 0
    content: bytes = b""
    files: tuple[PartFile, ...] = ()
    error: str = ""


Command = DumpRequest | Released | PartWanted

CRITICAL = (Evidence, PartWritten, Disabled, Goodbye, NodeEnded)
"""Reports that are spooled until acknowledged; the others are samples, and the newest wins."""


def is_critical(report: Report) -> bool:
    """True if losing this report could lose an incident. A round with evidence is, or one whose step was guarded."""
    if isinstance(report, RoundClosed):
        if report.guarded is not Guarded.NO:
            return True
        return report.evidence > 0 or report.skipped or bool(report.params_nonfinite or report.buffers_nonfinite)
    return isinstance(report, CRITICAL)
