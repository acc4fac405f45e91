"""How a run goes, round by round: the last rounds with loss, scale, norm and every rank's state, for curves and the heat map.

Owns a bounded ring per run and its running totals. Decides nothing about faults (the core does) and stores nothing: it is a
picture of the present, while incidents are on disk.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field, replace
from enum import IntEnum

from sentinel.wire.messages import Evidence, Phase, Report, RoundClosed

KEPT_ROUNDS = 512
SETTLED_BEHIND = 16  # a round this far behind the newest gets few reports any more
FLOAT16_MAX = 65504.0


class RankSaw(IntEnum):
    """What one rank saw in one round; the larger is the worse, so a block of ranks shows its largest."""

    NOTHING = 0  # no report of this round
    CLEAN = 1
    SKIPPED = 2  # its step was left out
    RECEIVED = 3  # something nonfinite or wrong came to it, or was noted
    OWN = 4  # its own loss, gradients or parameters were nonfinite


_RECEIVED_PHASES = frozenset({Phase.REDUCED, Phase.APPLIED, Phase.CLIP, Phase.MISUSE, Phase.EXIT})


@dataclass(slots=True)
class RoundRow:
    """One round over all ranks. Losses are unscaled; ``gradient_norm`` is the largest L2 norm of a rank's reduced gradients."""

    attempt: int
    round: int
    step: int
    ended_at: float = 0.0  # unix seconds by the ranks' clocks, the latest of them
    seconds: float | None = None  # since the round before ended
    closed: int = 0
    skipped: int = 0
    evidence: int = 0  # ranks' Evidence messages
    losses: int = 0
    loss_sum: float = 0.0
    loss_min: float = math.inf
    loss_max: float = -math.inf
    loss_nonfinite: int = 0
    loss_scale: float | None = None
    gradient_absmax: float | None = None
    float16_absmax_sum: float | None = None  # of what float16 reductions were given; None: there was none
    gradient_norm: float | None = None
    layer: str = ""  # whose gradient norm has grown most
    layer_growth: float | None = None  # how many times its usual norm that is; None: no rank knows
    complete: bool = False
    ranks: bytearray | bytes = field(default_factory=bytearray)  # RankSaw by rank; bytes: compressed

    @property
    def loss_mean(self) -> float | None:
        """Mean of the ranks' finite losses, NaN if all of them were nonfinite, None if no rank told one."""
        if self.losses:
            return self.loss_sum / self.losses
        return math.nan if self.loss_nonfinite else None

    @property
    def headroom(self) -> float | None:
        """How many times larger the ranks' gradients could sum up before float16 overflows; None where no float16 was reduced."""
        if self.float16_absmax_sum is None or not 0.0 < self.float16_absmax_sum < math.inf:
            return None
        return FLOAT16_MAX / self.float16_absmax_sum

    def saw(self) -> bytes:
        """``RankSaw`` of every rank, by rank."""
        return zlib.decompress(self.ranks) if isinstance(self.ranks, bytes) else bytes(self.ranks)

    def close(self, report: RoundClosed) -> None:
        """Add one rank's record."""
        self.closed += 1
        self.step = report.step
        self.ended_at = max(self.ended_at, report.at)
        self._note_loss(report.loss)
        if report.loss_scale is not None:
            self.loss_scale = report.loss_scale
        if report.gradient_absmax is not None:
            self.gradient_absmax = max(self.gradient_absmax or 0.0, report.gradient_absmax)
        if report.float16_absmax is not None:
            self.float16_absmax_sum = (self.float16_absmax_sum or 0.0) + report.float16_absmax
        if report.sync:
            norm = math.sqrt(sum(sync.norm * sync.norm for sync in report.sync))
            if norm or not report.gradient_absmax:  # 0 beside gradients that are not: results nobody could look at
                self.gradient_norm = _larger(self.gradient_norm, norm)
        if report.layer_growth is not None and report.layer_growth > (self.layer_growth or 0.0):
            self.layer, self.layer_growth = report.layer, report.layer_growth
        if report.skipped:
            self.skipped += 1
        self.mark(report.rank, RankSaw.SKIPPED if report.skipped else RankSaw.CLEAN)

    def _note_loss(self, loss: float | None) -> None:
        if loss is None:
            return
        if not math.isfinite(loss):
            self.loss_nonfinite += 1
            return
        self.losses += 1
        self.loss_sum += loss
        self.loss_min = min(self.loss_min, loss)
        self.loss_max = max(self.loss_max, loss)

    def mark(self, rank: int, saw: RankSaw) -> None:
        """Remember the worst that this rank saw."""
        if isinstance(self.ranks, bytes):
            self.ranks = bytearray(zlib.decompress(self.ranks))
        if rank >= len(self.ranks):
            self.ranks.extend(bytes(rank + 1 - len(self.ranks)))
        if saw > self.ranks[rank]:
            self.ranks[rank] = saw

    def settle(self) -> None:
        """Pack the ranks: nearly all of them saw the same."""
        if isinstance(self.ranks, bytearray):
            self.ranks = zlib.compress(bytes(self.ranks), 1)


def _larger(one: float | None, other: float) -> float:
    return other if one is None or not other <= one else one


class Progress:
    """The last ``KEPT_ROUNDS`` rounds of one run, and totals over all of its rounds. Runs on the loop's thread."""

    def __init__(self) -> None:
        self.version = 0  # grows with everything that could be shown
        self.newest: RoundRow | None = None  # the newest round that all ranks closed, or that is long past
        self.rounds_timed = 0
        self.round_seconds = 0.0
        self.rounds_skipped = 0  # rounds that any rank skipped
        self._rows: dict[tuple[int, int], RoundRow] = {}
        self._settling: list[tuple[int, int]] = []

    def note(self, report: Report, world_size: int) -> None:
        """Add one report. Those of rounds that have left the ring begin no new row."""
        if not isinstance(report, RoundClosed | Evidence) or report.rank < 0:
            return
        row = self._row(report, world_size)
        if row is None:
            return
        self.version += 1
        if isinstance(report, Evidence):
            row.evidence += 1
            row.mark(report.rank, RankSaw.RECEIVED if report.phase in _RECEIVED_PHASES else RankSaw.OWN)
            return
        row.close(report)
        self.rounds_skipped += report.skipped and row.skipped == 1
        if row.closed >= world_size > 0 and not row.complete:
            self._complete(row)

    def rows(self, last: int = KEPT_ROUNDS) -> tuple[RoundRow, ...]:
        """Copies of the newest rounds, oldest first."""
        kept = list(self._rows.values())[-last:] if last > 0 else []
        return tuple(replace(row, ranks=_frozen(row.ranks)) for row in sorted(kept, key=lambda r: (r.attempt, r.round)))

    def _row(self, report: RoundClosed | Evidence, world_size: int) -> RoundRow | None:
        key = (report.attempt, report.round)
        row = self._rows.get(key)
        if row is not None:
            return row
        if len(self._rows) >= KEPT_ROUNDS:
            oldest = next(iter(self._rows))
            if key < oldest:
                return None
            del self._rows[oldest]
        row = self._rows[key] = RoundRow(report.attempt, report.round, report.step, ranks=bytearray(world_size))
        self._settle_old(key)
        return row

    def _complete(self, row: RoundRow) -> None:
        row.complete = True
        before = self._rows.get((row.attempt, row.round - 1))
        if before is not None and before.complete and 0.0 <= row.ended_at - before.ended_at < 1e6:
            row.seconds = row.ended_at - before.ended_at
            self.rounds_timed += 1
            self.round_seconds += row.seconds
        self._is_newest(row)

    def _settle_old(self, opened: tuple[int, int]) -> None:
        self._settling.append(opened)
        while len(self._settling) > SETTLED_BEHIND:
            row = self._rows.get(self._settling.pop(0))
            if row is not None:
                row.settle()
                self._is_newest(row)

    def _is_newest(self, row: RoundRow) -> None:
        if self.newest is None or (row.attempt, row.round) > (self.newest.attempt, self.newest.round):
            self.newest = row


def _frozen(ranks: bytearray | bytes) -> bytearray | bytes:
    return ranks if isinstance(ranks, bytes) else bytearray(ranks)
