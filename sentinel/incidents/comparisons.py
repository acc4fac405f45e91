"""What decides about finite failures: the list of rules, run over every round that all ranks closed.

Owns which rules run when. Nothing is nonfinite in what they find, yet the training is wrong; the rules are in ``replicas.py`` and
``stalls.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sentinel.incidents import replicas, stalls
from sentinel.incidents.finding import Finding
from sentinel.incidents.history import History
from sentinel.incidents.window import RoundWindow

Rule = Callable[[RoundWindow, History], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    replicas.unequal_results,
    replicas.stale,
    replicas.drifted,
    stalls.disagreement,
    stalls.scaler_collapse,
    stalls.zeros,
    stalls.unmoved,
)
SPOILT_RULES: tuple[Rule, ...] = (stalls.disagreement, stalls.scaler_collapse)
"""Nonfinite values spoil sums and bits, so that such a round can be asked less."""


def compare(window: RoundWindow, history: History) -> list[Finding]:
    """All finite failures that this whole round shows."""
    window = window.active()
    if not window.closed:
        return []
    history.learn_groups(window)
    rules = SPOILT_RULES if window.has_nonfinite else RULES
    return [finding for rule in rules for finding in rule(window, history)]


def at_end(history: History) -> list[Finding]:
    """What was waiting for confirmation when the run ended, and still held. Local SGD may end in between two averages."""
    drift = [replicas.not_reduced(history.drift)] if history.drift is not None and not history.averages else []
    return [*drift, *stalls.unmoved_weights(history)]
