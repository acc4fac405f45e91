"""Gradient norms of this rank's layers, round by round: which layer grows, before anything is nonfinite.

Owns the last rounds' norms and what growth is: a layer's norm over its own usual one. Rank 0 keeps every round, the others one in
sixteen. Reads no tensor itself: norms come from checks that read the gradients anyway (``reductions.py``). Taking a bucket of many
layers apart costs more than reading it, so that is done in the first rounds, then in one of four, and in every one while gradients
grow (``closely``). Where no check knows whose gradients it reads, there is one look in sixteen rounds (``looked_for``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sentinel.bundle.manifest import LayerNorms as Table

KEPT_ROUNDS: Final = 64
OTHERS_EVERY: Final = 16
MAX_LAYERS: Final = 256
WARM_UP: Final = 16  # rounds before a layer's usual norm is known
MEMORY: Final = 32  # rounds over which it is averaged, in the logarithm
CLOSELY_EVERY: Final = 4
GROWS: Final = 2.0
"""Gradients grow if the norm of all, or of a layer when last looked at, is this many times the usual one."""
_ALL: Final = ""  # stands for a layer: all gradients


@dataclass(frozen=True, slots=True)
class Growth:
    """The layer that has grown most: its norm this round over its usual one."""

    layer: str
    factor: float


class LayerNorms:
    """Norms of the open round by parameter, and of the last rounds by layer (the module that owns the parameter)."""

    def __init__(self, rank: int) -> None:
        self._every = 1 if rank == 0 else OTHERS_EVERY
        self._open: dict[str, float] = {}
        self._scaled = False
        self._layers: dict[str, str] = {}  # of every parameter met
        self._rounds: deque[tuple[int, dict[str, float]]] = deque(maxlen=KEPT_ROUNDS)
        self._usual: dict[str, tuple[float, int]] = {}  # mean of log2, and of how many rounds
        self._latest: Growth | None = None
        self._growing = False

    def wanted(self, round_: int) -> bool:
        """Does this rank keep the norms of this round?"""
        return round_ % self._every == 0

    def closely(self, round_: int) -> bool:
        """Is it worth its time, in this round, to take a bucket apart that is read as a whole otherwise?"""
        due = self._every > 1 or round_ < MEMORY or round_ % CLOSELY_EVERY == 0
        return self.wanted(round_) and (due or self._growing)

    def looked_for(self, round_: int, *, broken: bool) -> bool:
        """Is it worth a look of its own? Where no check has told any: in one round of sixteen, and in one with a fault."""
        return (broken or (round_ % OTHERS_EVERY == 0 and not self._open)) and self.wanted(round_)

    def note(self, names: Sequence[str], norms: Iterable[float]) -> None:
        """L2 norms of gradients by their parameters' names; a later backward of the round replaces an earlier one's."""
        self._open.update(zip(names, norms, strict=True))

    def close(self, round_: int, scale: float | None, whole: float = 0.0) -> Growth | None:
        """The round is over, its loss was scaled by ``scale``, the norm of all gradients was ``whole`` (0: not known).

        None if no layer is known well enough. Where nothing was noted since it was no round to look closely, growth is as it was.
        """
        self._scaled |= scale is not None
        if (scale is None and self._scaled) or not self.wanted(round_):
            self._open.clear()  # if a round that no scaler has closed: by what its gradients were scaled is not known
            return None
        if self._open:
            norms = self._by_layer(scale or 1.0)
            self._open.clear()
            self._rounds.append((round_, norms))
            self._latest = self._growth(norms)
        elif self.closely(round_):
            self._latest = None
        grown = self._over_usual(_ALL, whole / (scale or 1.0)) or 0.0
        self._growing = 2.0**grown >= GROWS or (self._latest is not None and self._latest.factor >= GROWS)
        return self._latest

    def table(self) -> Table | None:
        """The last rounds as a bundle keeps them; None if there is nothing. None where a layer has no norm in a round."""
        rounds = list(self._rounds)
        if not rounds:
            return None
        names = dict.fromkeys(name for _, norms in rounds for name in norms)
        return Table(
            rounds=tuple(number for number, _ in rounds),
            layers={name: tuple(norms.get(name) for _, norms in rounds) for name in names},
        )

    def _by_layer(self, scale: float) -> dict[str, float]:
        if any(name not in self._layers for name in self._open):
            self._layers = _layers({*self._layers, *self._open})
        squares: dict[str, float] = {}
        for name, norm in self._open.items():
            layer = self._layers[name]
            squares[layer] = squares.get(layer, 0.0) + norm * norm
        return {layer: math.sqrt(square) / scale for layer, square in squares.items()}

    def _growth(self, norms: dict[str, float]) -> Growth | None:
        most, grown = -math.inf, ""
        for layer, norm in norms.items():
            over = self._over_usual(layer, norm)
            if over is not None and over > most:
                most, grown = over, layer
        return Growth(grown, 2.0 ** min(most, 1000.0)) if grown else None

    def _over_usual(self, layer: str, norm: float) -> float | None:
        """Logarithm (base 2) of a norm over the usual one, which it becomes part of; None while that is not known."""
        if not 0.0 < norm < math.inf:
            return None  # an overflow or a dead layer says nothing of what is usual
        size = math.log2(norm)
        usual, rounds = self._usual.get(layer, (size, 0))
        self._usual[layer] = (usual + (size - usual) / min(rounds + 1, MEMORY), rounds + 1)
        return size - usual if rounds >= WARM_UP else None


def _layers(names: Iterable[str]) -> dict[str, str]:
    """Parameter -> layer: the module that owns it, or of a model with very many, the module above that."""
    names = list(names)
    owners = {name: tuple(name.split(".")[:-1]) or (name,) for name in names}
    depth = max(map(len, owners.values()), default=1)
    while depth > 1 and len({owner[:depth] for owner in owners.values()}) > MAX_LAYERS:
        depth -= 1
    return {name: ".".join(owner[:depth]) for name, owner in owners.items()}
