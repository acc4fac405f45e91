"""When this rank writes its part of a bundle, and with which state.

Owns the decision and the budget of bundles; writing is ``dump.py``'s. A rank that saw the fault writes before the step, while
parameters are whole; a rank that is asked later writes what its window still holds, and says that the optimizer has stepped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from sentinel.bundle.manifest import LayerNorms
from sentinel.wire.messages import DumpRequest, PartWritten
from sentinel_agent.check import is_nonfinite
from sentinel_agent.config import AgentConfig
from sentinel_agent.copies import left_to_others
from sentinel_agent.dump import PartRequest, write_part
from sentinel_agent.identity import Identity
from sentinel_agent.naming import Naming
from sentinel_agent.redaction import Redaction
from sentinel_agent.rounds import Round
from sentinel_agent.startbuffers import StartBuffers
from sentinel_agent.window import Window

KEPT_ROUNDS = 16


class Evidencing:
    """Writes parts of this rank, at most ``config.max_bundles`` of its own accord; ``held()`` is around each writing."""

    def __init__(
        self,
        me: Identity,
        config: AgentConfig,
        window: Window,
        naming: Naming,
        send: Callable[[Any], None],
        scaler_state: Callable[[], dict[str, float] | None] = lambda: None,
        replicated: Callable[[], Iterable[str]] = tuple,
        held: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        layer_norms: Callable[[], LayerNorms | None] = lambda: None,
    ) -> None:
        self._held = held
        self._me = me
        self._config = config
        self._window = window
        self._redaction = Redaction(config.redact, me.health)
        self._naming = naming
        self._buffers = StartBuffers(naming)
        self._send = send
        self._scaler_state = scaler_state
        self._replicated = replicated
        self._layer_norms = layer_norms
        self._written: set[int] = set()
        self._planned: set[int] = set()  # rounds to come
        self._closed: dict[int, tuple[Round, int]] = {}
        self._last: int | None = None
        self._lock = threading.Lock()

    def suspicious(self, closing: Round, step: int, why: str) -> None:
        """A round with a nonfinite loss or gradient closes on this rank; the optimizer has not stepped yet."""
        continues = self._last == closing.number - 1
        self._last = closing.number
        if continues or closing.echoes:
            return  # the origin is on disk already: an echo would only fill the disk
        if len(self._written) >= self._config.max_bundles:
            self._me.health.drops["bundle_limit"] += 1
            return
        raw = closing.raw_gradients
        left = [(n, p.grad) for n, p in self._naming.parameters() if p.grad is not None and n not in raw]
        gradients = [*raw, *((n, g) for n, g in left if is_nonfinite(g))]
        self._write(closing, step, f"nonfinite values, closed by {why}", False, gradients)

    def restore_buffers(self) -> None:
        """A step is left out: buffers that its forward made nonfinite are put back as they were when the round began."""
        if left := self._buffers.restore_nonfinite():
            self._me.health.drops["buffers_not_restored"] += left

    def training_begins(self) -> None:
        """The first forward is about to run: the first round starts from these buffers."""
        self._buffers.take()

    def closed(self, closing: Round, step: int) -> None:
        """Remember the last rounds, for requests that come later, and the buffers that the next one starts from."""
        with self._lock:
            planned = closing.number in self._planned
            self._planned.discard(closing.number)
            self._closed[closing.number] = (closing, step)
            self._closed.pop(closing.number - KEPT_ROUNDS, None)
        if planned or closing.number == self._config.dump_round:
            self._write(closing, step, "asked for" if planned else "asked for by an option", False, [])
        self._buffers.take()

    def requested(self, request: DumpRequest) -> None:
        """The coordinator wants this rank's part of a round it saw nothing wrong in, or of one to come. On the channel's thread."""
        if request.attempt != self._me.attempt or (request.ranks and self._me.rank not in request.ranks):
            return
        with self._lock:
            if request.round > max(self._closed, default=-1):
                self._planned.add(request.round)
                return
        closing, step = self._closed.get(request.round, (Round(request.round), request.round))
        self._write(closing, step, "requested by the coordinator", True, [])

    def _write(
        self, closing: Round, step: int, reason: str, after: bool, gradients: list[tuple[str, torch.Tensor]]
    ) -> None:
        number = closing.number
        with self._lock:
            if number in self._written:
                return
            self._written.add(number)
        with self._held():
            self._write_now(closing, step, reason, after, gradients)

    def _write_now(
        self, closing: Round, step: int, reason: str, after: bool, gradients: list[tuple[str, torch.Tensor]]
    ) -> None:
        number = closing.number
        parameters, buffers = list(self._naming.parameters()), list(self._naming.buffers())
        result = write_part(
            PartRequest(
                run_dir=self._config.run_dir,
                run_id=self._config.run_id,
                attempt=self._me.attempt,
                rank=self._me.rank,
                world_size=self._me.world_size,
                node=self._me.node,
                round=number,
                step=step,
                state_after_step=after,
                reason=reason,
                loss=closing.loss,
                loss_scale=closing.loss_scale,
                level=_level(self._config.dump_level),
                entries=self._window.entries(number),
                named_parameters=[] if after else parameters,
                named_buffers=[] if after else buffers,
                start_buffers=[] if after else self._buffers.named(),
                nonfinite_gradients=gradients,
                raw_gradients=tuple(name for name, _ in closing.raw_gradients),
                optimizers=() if after else tuple(self._naming.optimizers()),
                scaler=None if after else self._scaler_state(),
                byte_cap=self._config.part_bytes,
                redaction=self._redaction,
                layer_norms=self._layer_norms(),
                left_to_others=left_to_others(
                    self._me.rank, self._me.world_size, suspect=closing.suspect, replicated=self._replicated()
                ),
            )
        )
        self._send(
            PartWritten(
                attempt=self._me.attempt,
                rank=self._me.rank,
                round=number,
                step=step,
                node=self._me.node,
                directory=result.directory,
                bytes=result.bytes,
                seconds=result.seconds,
                error=result.error,
            )
        )


def _level(name: str) -> Literal["stats", "batch", "full"]:
    """The level of this name; one that is not known keeps batches, as the default does."""
    return "stats" if name == "stats" else "full" if name == "full" else "batch"
