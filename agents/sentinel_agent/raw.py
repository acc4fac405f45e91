"""Gradients found nonfinite before a collective wrote them, cloned for the bundle of their round.

Owns the clones and their budget. Replay recomputes these gradients and compares them bit by bit; after the reduction they would
be a sum of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from torch import Tensor

from sentinel_agent.contents import sparse_parts

BUDGET: Final = 128 << 20  # bytes of clones per round


class RawGradients:
    """Clones by parameter name, each as it was first kept."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._bytes = 0

    def keep(self, gradients: Iterable[tuple[str, Tensor]], wanted: Collection[str]) -> None:
        """Clone those gradients that are wanted, as far as the budget goes."""
        for name, gradient in gradients:
            if name not in wanted or name in self._kept:
                continue
            plain = getattr(gradient, "_local_tensor", gradient)
            self._bytes += _nbytes(plain)
            if self._bytes > BUDGET:
                return
            self._kept[name] = plain.detach().clone()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._kept.items())

    def __contains__(self, name: str) -> bool:
        return name in self._kept


def _nbytes(tensor: Tensor) -> int:
    parts = sparse_parts(tensor)
    return sum(part.nbytes for part in parts.values()) if parts else tensor.nbytes
