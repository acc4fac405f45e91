"""The window: micro-batches and RNG states of the last rounds, so that the one that went wrong can be written and replayed.

Owns what is kept for how long, within a cap of bytes. Called by the taps in the training thread, where it must be cheap and
must not raise; read by whoever dumps, on any thread. How a batch is taken apart is in ``capture.py``, how it is written in
``dump.py``.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final, Literal

import torch

from sentinel_agent.capture import Captured, Drop, Held, capture, released
from sentinel_agent.rng import RngState, snapshot

MAX_PENDING: Final = 8  # batches of a loader that no forward used, once forwards are seen at all
MAX_PENDING_BLIND: Final = 64  # the same where no root is watched and a whole accumulation may be pending
MAX_ENTRIES: Final = 256  # of one round


@dataclass(frozen=True, slots=True)
class Entry:
    """One micro-batch as it was caught: from the DataLoader, or as the root module's inputs.

    ``rng`` is the state before the loader made the batch, or when the forward began; ``round_rng`` the state at the end of the
    previous round, which is what hand-made inputs of this round were drawn from.
    """

    source: Literal["loader", "forward"]
    captured: Captured
    rng: RngState
    round_rng: RngState
    sample_indices: tuple[Any, ...] | None = None


class _Use(Enum):
    PENDING = auto()  # fetched, not yet seen in a forward
    EVALUATED = auto()  # a forward without gradients took it: gone with the next batch, unless training takes it too
    USED = auto()


@dataclass(slots=True, eq=False)
class _Slot:
    entry: Entry
    use: _Use


class Window:
    """Ring of the last ``rounds`` sealed rounds and the open one, at most ``byte_cap`` bytes of tensors.

    Tensors of up to ``clone_below`` bytes are cloned, larger ones and those of an accelerator are kept by reference. ``drops``
    counts what is missing, by ``Drop`` reason.
    """

    def __init__(self, rounds: int = 2, byte_cap: int = 256 << 20, clone_below: int = 1 << 20) -> None:
        self.drops: Counter[str] = Counter()
        self.bytes_held = 0
        self._byte_cap = byte_cap
        self._clone_below = clone_below
        self._lock = threading.RLock()  # the dumping thread reads; a finaliser may re-enter
        self._sealed: deque[tuple[int, list[_Slot]]] = deque()
        self._rounds = rounds
        self._open: list[_Slot] = []
        self._next_round = 0
        self._known: dict[int, Held] = {}  # by id of the user's tensor, for loader batches still in the ring
        self._forwards_seen = False
        self._round_rng = snapshot()

    def before_batch(self) -> RngState:
        """RNG states before the loader makes its next batch; give them to ``loader_batch``."""
        return snapshot()

    def loader_batch(
        self, batch: object, sample_indices: Sequence[Any] | None = None, rng: RngState | None = None
    ) -> None:
        """Keep a batch that a DataLoader returned. ``rng`` is what ``before_batch`` gave before it was made."""
        captured = capture(batch, self._clone_below, self._known, self.drops)
        indices = None if sample_indices is None else tuple(sample_indices)
        entry = Entry("loader", captured, rng or snapshot(), self._round_rng, indices)
        with self._lock:
            self._discard_evaluated()
            self._add(_Slot(entry, _Use.PENDING))
            self._known.update((held.origin_id, held) for held in captured.held if held.holders)
            self._limit_pending()

    def forward_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the inputs of an outermost root forward; without gradients only note that its batch was for evaluation."""
        self._forwards_seen = True
        if not torch.is_grad_enabled():
            self._mark_evaluated(args, kwargs)
            return
        value = {"args": args, "kwargs": kwargs} if kwargs else {"args": args}
        captured = capture(value, self._clone_below, self._known, self.drops)
        entry = Entry("forward", captured, snapshot(), self._round_rng, self._indices_of(captured))
        with self._lock:
            for slot in self._open:
                slot.use = _Use.USED
            self._add(_Slot(entry, _Use.USED))

    def close_round(self, round_: int) -> None:
        """Seal the open entries under ``round_`` and take the RNG states that the next round starts from."""
        rng = snapshot()
        with self._lock:
            self._sealed.append((round_, self._open))
            self._open = []
            self._next_round = round_ + 1
            self._round_rng = rng
            while len(self._sealed) > self._rounds:
                for slot in self._sealed.popleft()[1]:
                    self._forget(slot)

    def entries(self, round_: int) -> tuple[Entry, ...]:
        """Entries of a round that is still in the ring, the open one included; empty if it is not. Any thread may ask."""
        with self._lock:
            if round_ == self._next_round:
                return tuple(slot.entry for slot in self._open)
            for number, slots in reversed(self._sealed):
                if number == round_:
                    return tuple(slot.entry for slot in slots)
        return ()

    def rounds(self) -> tuple[int, ...]:
        """Numbers of the sealed rounds in the ring, oldest first."""
        with self._lock:
            return tuple(number for number, _ in self._sealed)

    def _add(self, slot: _Slot) -> None:
        self._open.append(slot)
        for held in slot.entry.captured.held:
            if held.holders == 0:
                self.bytes_held += held.nbytes
            held.holders += 1
        if sum(held.nbytes for held in slot.entry.captured.held) > self._byte_cap:
            self._release(slot)  # it would push out everything else and still not fit
        while self.bytes_held > self._byte_cap and (victim := self._oldest()) is not None:
            self._release(victim)
        if len(self._open) > MAX_ENTRIES:
            self._drop(self._open.pop(0), Drop.UNUSED_BATCH)

    def _oldest(self) -> _Slot | None:
        return next((slot for slot in self._slots() if slot.entry.captured.held), None)

    def _slots(self) -> Iterator[_Slot]:
        for _, slots in self._sealed:
            yield from slots
        yield from self._open

    def _release(self, slot: _Slot) -> None:
        """Give up the tensors of an entry but keep its structure, indices and RNG: they still tell which samples it was."""
        self.drops[Drop.BYTE_CAP] += 1
        self._forget(slot)
        slot.entry = replace(slot.entry, captured=released(slot.entry.captured, Drop.BYTE_CAP))

    def _drop(self, slot: _Slot, reason: Drop) -> None:
        self.drops[reason] += 1
        self._forget(slot)

    def _forget(self, slot: _Slot) -> None:
        for held in slot.entry.captured.held:
            held.holders -= 1
            if held.holders > 0:
                continue
            self.bytes_held -= held.nbytes
            if self._known.get(held.origin_id) is held:
                del self._known[held.origin_id]

    def _indices_of(self, captured: Captured) -> tuple[Any, ...] | None:
        """Sample indices of the loader batch whose very tensors a forward was given."""
        shared = [held for held in captured.held if held.holders > 0]
        if not shared:
            return None
        for slot in reversed(list(self._slots())):
            if slot.entry.source == "loader" and any(held in slot.entry.captured.held for held in shared):
                return slot.entry.sample_indices
        return None

    def _mark_evaluated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The pending batch whose tensors these are, or else the newest, is taken to be the one evaluated."""
        pending = [slot for slot in self._open if slot.use is _Use.PENDING]
        if not pending:
            return
        known = [self._known.get(id(value)) for value in (*args, *kwargs.values())]
        for slot in pending:
            if any(held is not None and held in slot.entry.captured.held for held in known):
                slot.use = _Use.EVALUATED
                return
        pending[-1].use = _Use.EVALUATED

    def _discard_evaluated(self) -> None:
        stale = [slot for slot in self._open if slot.use is _Use.EVALUATED]
        for slot in stale:
            self._open.remove(slot)
            self._drop(slot, Drop.EVALUATION_BATCH)

    def _limit_pending(self) -> None:
        limit = MAX_PENDING if self._forwards_seen else MAX_PENDING_BLIND
        pending = [slot for slot in self._open if slot.use is _Use.PENDING]
        for slot in pending[: max(0, len(pending) - limit)]:
            self._open.remove(slot)
            self._drop(slot, Drop.UNUSED_BATCH)
