"""How a GradScaler looks for its scale: which of its skips that explains.

Owns what agents and coordinator must agree on: a rank keeps evidence of the very skips that the coordinator asks about.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ScaleSearch:
    """Scales and skips so far. ``searching`` is True while skips are explained by the search for a scale.

    A scaler starts high and grows now and then, and each time overflow in the *scaled* gradients makes it skip once or a few times.
    """

    last_step_scale: float | None = None  # scale of the last round that did step
    consecutive_skips: int = 0
    searching: bool = True

    def explains(self, scale: float) -> bool:
        """True if a skip at ``scale`` belongs to a search: none stepped yet, or the scale grew since the last step."""
        if self.consecutive_skips:
            return self.searching
        return self.last_step_scale is None or scale > self.last_step_scale

    def closed(self, scale: float | None, *, skipped: bool) -> None:
        """A round was closed at this scale (None: without a scaler, which says nothing)."""
        if scale is None:
            return
        if skipped:
            self.searching = self.explains(scale)
            self.consecutive_skips += 1
        else:
            self.last_step_scale, self.consecutive_skips = scale, 0
