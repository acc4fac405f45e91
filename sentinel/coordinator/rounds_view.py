"""The last rounds of a run as pages and programs read them: curves, and every rank's state summed up in blocks.

Owns the JSON form and the summing up, so that 16,384 ranks are as quick to send and to draw as eight. Runs on the pages' threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from sentinel.coordinator.progress import RankSaw, RoundRow

MAX_BLOCKS = 128
MAX_ROUNDS = 512


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class RoundView(_Record):
    """One round over all ranks. Losses are unscaled; null: not told by any rank."""

    attempt: int
    round: int
    step: int
    ended_at: float = Field(description="unix seconds by the ranks' clocks, the latest of them; 0 while none closed it")
    seconds: float | None = Field(description="since the round before ended")
    closed: int = Field(description="ranks that have closed it")
    skipped: int = Field(description="ranks whose step was left out")
    loss_min: float | None
    loss_mean: float | None
    loss_max: float | None
    loss_nonfinite: int = Field(description="ranks whose loss was NaN or infinite")
    loss_scale: float | None
    gradient_norm: float | None
    gradient_absmax: float | None
    headroom: float | None = Field(description="float16's maximum over the sum of the ranks' largest gradients")
    layer: str = Field(
        description="whose gradient norm has grown most over its own usual one; empty while that is not known"
    )
    layer_growth: float | None = Field(description="how many times its usual norm that is")
    blocks: str = Field(description="one digit of RankSaw for each block of ranks, the worst in it")


class RoundsAnswer(_Record):
    """Answer of ``/api/v1/rounds``: rounds oldest first, and which ranks a block holds."""

    schema_version: Literal[1] = 1
    run_id: str
    world_size: int
    first_rank: int
    ranks: int = Field(description="ranks that the blocks cover, from first_rank on")
    ranks_per_block: int
    legend: dict[str, str]
    rounds: tuple[RoundView, ...]


LEGEND = {
    str(int(RankSaw.NOTHING)): "no report",
    str(int(RankSaw.CLEAN)): "clean",
    str(int(RankSaw.SKIPPED)): "step skipped",
    str(int(RankSaw.RECEIVED)): "received nonfinite or wrong values",
    str(int(RankSaw.OWN)): "its own values were nonfinite",
}


def rounds_answer(
    run_id: str, rows: Sequence[RoundRow], world_size: int, *, blocks: int, first: int, count: int
) -> RoundsAnswer:
    """``rows`` with the ranks from ``first`` on (``count`` of them, 0: all) in at most ``blocks`` blocks of equal size."""
    size = max(world_size, max((len(row.saw()) for row in rows[-1:]), default=0))
    first = min(max(first, 0), max(size - 1, 0))
    ranks = min(count, size - first) if count > 0 else size - first
    per_block = max(1, -(-ranks // min(max(blocks, 1), MAX_BLOCKS)))
    return RoundsAnswer(
        run_id=run_id,
        world_size=world_size,
        first_rank=first,
        ranks=ranks,
        ranks_per_block=per_block,
        legend=LEGEND,
        rounds=tuple(_view(row, first, ranks, per_block) for row in rows),
    )


def _view(row: RoundRow, first: int, ranks: int, per_block: int) -> RoundView:
    return RoundView(
        attempt=row.attempt,
        round=row.round,
        step=row.step,
        ended_at=row.ended_at,
        seconds=row.seconds,
        closed=row.closed,
        skipped=row.skipped,
        loss_min=row.loss_min if row.losses else None,
        loss_mean=row.loss_mean,
        loss_max=row.loss_max if row.losses else None,
        loss_nonfinite=row.loss_nonfinite,
        loss_scale=row.loss_scale,
        gradient_norm=row.gradient_norm,
        gradient_absmax=row.gradient_absmax,
        headroom=row.headroom,
        layer=row.layer,
        layer_growth=row.layer_growth,
        blocks=_blocks(row.saw(), first, ranks, per_block),
    )


def _blocks(saw: bytes, first: int, ranks: int, per_block: int) -> str:
    shown = saw[first : first + ranks].ljust(ranks, b"\0")
    if per_block == 1:
        return "".join(map(str, shown))
    # Python's max over a slice of bytes runs in C: 16,384 ranks take a quarter of a millisecond.
    return "".join(str(max(shown[at : at + per_block])) for at in range(0, ranks, per_block))
