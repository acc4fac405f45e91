"""What the layers' gradient norms of a bundle say of the rounds before a fault: which grew, which broke first.

Owns the reading of them. Of several parts the one with most rounds is read: reduced gradients are the same on every rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sentinel.bundle.manifest import LayerNorms, PartHeader
from sentinel.postmortem.text import number

BASELINE: Final = 16  # rounds before the last finite one whose median is a layer's usual norm
RECENT: Final = 4  # of them, the last, which are no part of it
GROWN: Final = 10.0  # factor from which growth is worth a sentence


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. ``points`` are (round, norm); ``growth`` is the last finite norm over the usual one, None if too few are known."""

    name: str
    points: tuple[tuple[int, float], ...]
    usual: float | None
    last: float | None
    growth: float | None
    broke: int | None  # the first round in which its norm was not finite


@dataclass(frozen=True, slots=True)
class LayerStory:
    """The layers of one rank: those that broke first come first, then the others by growth."""

    rank: int
    layers: tuple[Layer, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is worth saying; nothing if no layer grew or broke."""
        return (*self._grown(), *self._broken())

    def _grown(self) -> Iterable[str]:
        grown = [one for one in self.layers if one.growth is not None and one.growth >= GROWN]
        if grown:
            most = max(grown, key=lambda one: one.growth or 0.0)
            others = f" ({len(grown)} of {len(self.layers)} layers grew tenfold or more)" if len(grown) > 1 else ""
            yield (
                f"the gradient norm of layer {most.name} had grown {number(most.growth)}-fold before, "
                f"from {number(most.usual)} to {number(most.last)}{others}"
            )

    def _broken(self) -> Iterable[str]:
        broken = [one for one in self.layers if one.broke is not None]
        if broken:
            first = min(one.broke for one in broken if one.broke is not None)
            names = [one.name for one in broken if one.broke == first]
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            yield f"in round {first} the norms of layers {', '.join(names[:6])}{more} were not finite, of {len(self.layers)} layers"


def layer_story(headers: Iterable[PartHeader]) -> LayerStory | None:
    """The story of the part that kept most rounds; None if none kept any."""
    kept = [(header.rank, header.layer_norms) for header in headers if header.layer_norms is not None]
    if not kept:
        return None
    rank, norms = max(kept, key=lambda one: (len(one[1].rounds), -one[0]))
    layers = sorted(_layers(norms), key=lambda one: (one.broke is None, -(one.growth or 0.0), one.name))
    return LayerStory(rank, tuple(layers))


def _layers(norms: LayerNorms) -> Iterable[Layer]:
    for name, values in norms.layers.items():
        points = tuple((r, v) for r, v in zip(norms.rounds, values, strict=False) if v is not None)
        broke = next((r for r, v in points if not math.isfinite(v)), None)
        finite = [v for r, v in points if math.isfinite(v) and (broke is None or r < broke)]
        usual = finite[-BASELINE - RECENT : -RECENT]
        middle = statistics.median(usual) if len(usual) >= RECENT else None
        last = finite[-1] if finite else None
        growth = last / middle if middle and last is not None else None
        yield Layer(name, points, middle, last, growth, broke)
