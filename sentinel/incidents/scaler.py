"""Is a skip of the GradScaler ordinary? History of loss scales and skips of one attempt.

Owns rule 1's memory. A scaler searches its scale: it starts high and grows now and then, and each time overflow in the *scaled*
gradients makes it skip once or a few times. Those skips are healthy; the others are not explained by the scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from sentinel.wire.messages import RoundClosed

MAX_CONSECUTIVE_SKIPS = 20
"""More skips in a row than a search can need: from 2**16 halving reaches 1/16 after twenty."""


@dataclass(slots=True)
class ScalerHistory:
    """Scales and skips so far. ``searching`` is True while skips are explained by the search for a scale."""

    last_step_scale: float | None = None  # scale of the last round that did step
    consecutive_skips: int = 0
    searching: bool = True

    def explains(self, scale: float) -> bool:
        """True if a skip at ``scale`` belongs to a search: none stepped yet, or the scale grew since the last step."""
        if self.consecutive_skips:
            return self.searching
        return self.last_step_scale is None or scale > self.last_step_scale

    def note(self, closed: RoundClosed) -> None:
        """Take in a closed round (one rank's record is enough: the scale is common to all)."""
        if closed.loss_scale is None:
            return
        if closed.skipped:
            self.searching = self.explains(closed.loss_scale)
            self.consecutive_skips += 1
        else:
            self.last_step_scale, self.consecutive_skips = closed.loss_scale, 0
