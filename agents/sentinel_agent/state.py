"""The state a round starts from: are parameters or buffers already nonfinite, and is that news?

Owns what was seen damaged before. Damage that stays (a run that trains on after NaN reached its weights) is told when it
appears and then only kept in mind, so that the echo of one fault does not drown the next one, nor the disk.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from sentinel_agent.check import is_nonfinite
from sentinel_agent.scan import Scan, Scanned


@dataclass(frozen=True, slots=True)
class Damage:
    """What a look at the state found. ``news`` holds the findings that were not there in the round before."""

    parameters: bool
    buffers: bool
    parameter_news: Scanned | None
    buffer_news: Scanned | None


class State:
    """Looks at parameters and buffers, and remembers what was damaged."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._damaged: weakref.ref[torch.Tensor] | None = None
        self._buffers: frozenset[str] = frozenset()

    @property
    def still_damaged(self) -> bool:
        """Is the parameter that was first found nonfinite still so? One small read."""
        damaged = self._damaged() if self._damaged is not None else None
        return damaged is not None and is_nonfinite(damaged)

    def look(self, *, suspicious: bool) -> Damage:
        """Before a step: everything if the round latched something, else buffers alone (they are small) and known damage."""
        known = self.still_damaged
        found = self._scan.parameters() if suspicious and not known else None
        news = found if found is not None and found.nonfinite else None
        if news is not None:
            self._damaged = self._first(news.names[0])
        elif not known:
            self._damaged = None
        buffers, buffer_news = self._look_at_buffers(suspicious)
        return Damage(known or news is not None, buffers, news, buffer_news)

    def _look_at_buffers(self, suspicious: bool) -> tuple[bool, Scanned | None]:
        if not suspicious and self._scan.buffers_look_finite():
            self._buffers = frozenset()
            return False, None
        found = self._scan.buffers()
        names = frozenset(found.names)
        news = found if names - self._buffers else None
        self._buffers = names
        return found.nonfinite, news

    def _first(self, name: str) -> weakref.ref[torch.Tensor] | None:
        return next((weakref.ref(p) for known, p in self._scan.naming.parameters() if known == name), None)
