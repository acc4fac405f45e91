"""A training of any number of ranks as a coordinator hears it: plausible numbers, one rank's NaN, over a real connection.

Owns the numbers, made from a seed. For pages, top and benchmarks, which need many ranks and no training.
"""

from __future__ import annotations

import math
import random
import time

from relay_client import RelayClient

from sentinel.wire.codec import MAX_BATCH
from sentinel.wire.messages import (
    Check,
    ClosedBy,
    Collective,
    Evidence,
    GroupSync,
    Hello,
    Phase,
    Report,
    Role,
    RoundClosed,
    is_critical,
)

RESEND_SECONDS = 3.0
ACKNOWLEDGED_SECONDS = 90.0


class TrainingStory:
    """Rounds of ``ranks`` ranks. ``guilty`` maps a round to the rank whose gradients are NaN in it; GradScaler skips it."""

    def __init__(
        self, ranks: int, guilty: dict[int, int] | None = None, *, started_at: float = 1e9, seed: int = 7
    ) -> None:
        self.ranks = ranks
        self.guilty = guilty or {}
        self.started_at = started_at
        self.scale = 65536.0
        self._chance = random.Random(seed)

    def hellos(self) -> list[Report]:
        """Every rank's first report, eight ranks to a node."""
        return [
            Hello(
                0, rank, rank % 8, rank // 8, self.ranks, 1000 + rank, f"node{rank // 8}", "0", "2.13", self.started_at
            )
            for rank in range(self.ranks)
        ]

    def round(self, number: int) -> list[Report]:
        """All reports of one round."""
        guilty = self.guilty.get(number)
        skipped = guilty is not None or number in (0, 1)
        level = 2.3 * math.exp(-number / 60) + 0.35
        norm = (
            math.nan
            if guilty is not None
            else self.scale * (0.02 + 0.08 * math.exp(-number / 25)) * self._chance.uniform(0.8, 1.3)
        )
        reports: list[Report] = []
        for rank in range(self.ranks):
            if guilty is not None:
                reports.append(self._evidence(rank, number, Phase.WIRE if rank == guilty else Phase.REDUCED))
            reports.append(self._closed(rank, number, level, norm, skipped, nonfinite=rank == guilty))
        if skipped:
            self.scale /= 2
        return reports

    def _closed(self, rank: int, number: int, level: float, norm: float, skipped: bool, nonfinite: bool) -> RoundClosed:
        sync = (GroupSync("0", (), self.ranks, 1, 7, 8, norm=norm),)
        return RoundClosed(
            0,
            rank,
            number,
            number,
            ClosedBy.SCALER_SKIP if skipped else ClosedBy.OPTIMIZER,
            self.started_at + 0.41 * number + self._chance.uniform(0, 0.03),
            int(number in self.guilty),
            4,
            loss=math.nan if nonfinite else level * self._chance.uniform(0.9, 1.12),
            loss_scale=self.scale,
            skipped=skipped,
            gradient_absmax=self.scale * 1e-3,
            sync=sync,
        )

    def _evidence(self, rank: int, number: int, phase: Phase) -> Evidence:
        clean, seen = Check(1_180_000, 0, 0, 3.1), Check(1_180_000, 1_179_648, 0, 0.0)
        own = phase is Phase.WIRE
        reduction = Collective(
            "0", (), 0, "allreduce_", "sum", "float16", Role.GRADIENT, seen if own else clean, None if own else seen
        )
        names = ("encoder.norm.weight", "encoder.norm.bias", "encoder.layers.11.mlp.weight")
        return Evidence(0, rank, number, number, 0, phase, self.started_at + 0.41 * number, seen, names, 48, reduction)


def send(relay: RelayClient, reports: list[Report]) -> None:
    """Send reports in frames of a relay's size, and as a relay does, the critical ones until they are acknowledged."""
    owed = {}
    for at in range(0, len(reports), MAX_BATCH):
        batch = reports[at : at + MAX_BATCH]
        sequence = relay.send(batch)
        if any(is_critical(report) for report in batch):
            owed[sequence] = batch
    deadline = time.monotonic() + ACKNOWLEDGED_SECONDS
    while owed:
        resend_at = time.monotonic() + RESEND_SECONDS
        while owed and time.monotonic() < resend_at:
            relay.listen(50)
            owed = {sequence: batch for sequence, batch in owed.items() if sequence not in relay.acks}
        assert time.monotonic() < deadline, f"{len(owed)} critical frames were not acknowledged"
        for sequence, batch in owed.items():
            relay.send(batch, sequence)
