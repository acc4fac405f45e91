"""All rules, by name.

Owns the list. A new rule goes into the module of its family in ``rules/`` and gets a section in deploy/LINT.md.
"""

from __future__ import annotations

from sentinel.postmortem.lint.finding import Rule
from sentinel.postmortem.lint.rules import (
    clipping,
    collectives,
    division,
    domain,
    losses,
    precision,
    replicas,
    scaler,
    softmax,
    state,
)

FAMILIES = (division, domain, softmax, losses, precision, scaler, clipping, collectives, replicas, state)
RULES: dict[str, Rule] = {rule.id: rule for family in FAMILIES for rule in family.RULES}
