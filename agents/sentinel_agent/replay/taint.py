"""Which nonfinite values come from where: causes of what a storage holds.

Owns the map from storages to causes. Views share their base's causes for free; a finite write clears them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from sentinel.bundle.replayed import BadOp


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """A nonfinite value came in here. ``parents`` are the constants that an escalation was made of."""

    order: int
    found: BadOp
    parents: tuple[Event, ...] = field(default=())

    @property
    def is_constant(self) -> bool:
        """A constant that the user wrote, such as a mask's -inf: legitimate until NaN is made of it."""
        return self.found.kind == "constant"


Causes = tuple[Event, ...]


class Taint:
    """Causes by storage. Tainted tensors are held, so that no other takes their storage's place."""

    def __init__(self) -> None:
        self._causes: dict[int, Causes] = {}
        self._names: dict[int, str] = {}
        self._seen: set[int] = set()
        self._held: list[Tensor] = []

    def of(self, tensor: Tensor) -> Causes:
        """Causes of what the storage of ``tensor`` holds; empty if none is known."""
        return self._causes.get(storage(tensor), ())

    def set(self, tensor: Tensor, causes: Causes) -> None:
        """``tensor`` is nonfinite because of ``causes``."""
        key = storage(tensor)
        self._causes[key] = causes
        self._seen.add(key)
        self._held.append(tensor)

    def clear(self, tensor: Tensor) -> None:
        """``tensor`` was written and is finite."""
        key = storage(tensor)
        self._causes.pop(key, None)
        self._seen.add(key)

    def seen(self, tensor: Tensor) -> bool:
        """True if what this storage holds was looked at before."""
        return storage(tensor) in self._seen

    def name(self, tensor: Tensor, what: str) -> None:
        """Call a tensor from outside of the step, so that it can be named if it turns out nonfinite."""
        key = storage(tensor)
        self._names[key] = what
        self._seen.discard(key)
        self._causes.pop(key, None)
        self._held.append(tensor)

    def name_of(self, tensor: Tensor) -> str | None:
        """What a tensor from outside is called."""
        return self._names.get(storage(tensor))


def storage(tensor: Tensor) -> int:
    """Identity of the storage behind ``tensor`` (of its local shard, for a DTensor)."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        return int(local.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without one
        return id(local)


def merged(causes: Iterable[Causes]) -> Causes:
    """All causes once, earliest first."""
    unique = {event.order: event for some in causes for event in some}
    return tuple(unique[order] for order in sorted(unique))


def strongest(causes: Causes) -> Causes:
    """Causes that explain a fault: constants only if there is nothing else, then in order."""
    return tuple(sorted(causes, key=lambda event: (event.is_constant, event.order)))
