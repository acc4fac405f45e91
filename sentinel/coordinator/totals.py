"""Running totals of one run that metrics show and the core does not need.

Owns adding up; what is exposed under which name is in ``metrics.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from sentinel.wire.messages import PartWritten, Report, RoundClosed

DUMP_BUCKETS_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)


class DumpFailure(StrEnum):
    """Why a bundle is not what it should be; label values of ``sentinel_dump_failures_total``."""

    PART_ERROR = "part_error"  # a rank could not write its part
    PARTIAL = "partial"  # committed without all parts
    COMMIT_ERROR = "commit_error"  # the manifest could not be written
    FETCH_ERROR = "fetch_error"  # a part stays on its own host


@dataclass(slots=True)
class Timings:
    """Durations as a histogram's cumulative pieces (seconds)."""

    bounds: tuple[float, ...] = ()
    count: int = 0
    sum: float = 0.0
    by_bound: list[int] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        """Count one duration; nonsense (negative, not finite) is left out."""
        if not 0.0 <= seconds < 1e9:
            return
        if not self.by_bound:
            self.by_bound = [0] * (len(self.bounds) + 1)
        self.by_bound[bisect_left(self.bounds, seconds)] += 1
        self.count += 1
        self.sum += seconds


@dataclass(slots=True)
class Totals:
    """What came in, by size and time."""

    last_report_at: float = 0.0
    rank_rounds: int = 0  # RoundClosed reports
    check_seconds: float = 0.0
    dump_parts: int = 0
    dump_bytes: int = 0
    dump_seconds: Timings = field(default_factory=lambda: Timings(DUMP_BUCKETS_SECONDS))
    dump_failures: Counter[DumpFailure] = field(default_factory=Counter)
    classify_seconds: float = 0.0
    classify_calls: int = 0
    bundles: int = 0

    def note(self, report: Report, now: float) -> None:
        """Add one report."""
        self.last_report_at = max(self.last_report_at, now)
        if isinstance(report, RoundClosed):
            self.rank_rounds += 1
            if 0.0 <= report.check_seconds < 1e6:
                self.check_seconds += report.check_seconds
        elif isinstance(report, PartWritten):
            self._note_part(report)

    def _note_part(self, part: PartWritten) -> None:
        if part.error:
            self.dump_failures[DumpFailure.PART_ERROR] += 1
            return
        self.dump_parts += 1
        self.dump_bytes += max(part.bytes, 0)
        self.dump_seconds.add(part.seconds)
