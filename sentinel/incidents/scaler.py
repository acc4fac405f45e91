"""Is a skip of the GradScaler ordinary? History of loss scales and skips of one attempt.

Owns rule 1's memory. Skips that the search for a scale explains (``wire/scale.py``) are healthy; the others need another reason.
"""

from __future__ import annotations

from sentinel.wire.messages import RoundClosed
from sentinel.wire.scale import ScaleSearch

MAX_CONSECUTIVE_SKIPS = 20
"""More skips in a row than a search can need: from 2**16 halving reaches 1/16 after twenty."""


class ScalerHistory(ScaleSearch):
    """Scales and skips so far."""

    def note(self, closed: RoundClosed) -> None:
        """Take in a closed round (one rank's record is enough: the scale is common to all)."""
        self.closed(closed.loss_scale, skipped=closed.skipped)
