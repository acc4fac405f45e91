"""One replay in one process: runs the user's loop up to the recorded round, that round for real, and stops at its end.

Owns the phases. The script first runs *forward* (its own loop, with nothing computed that the recorded state does not
replace), then *live* (the recorded round, traced), and the process ends with the outcome. The patches are in ``hooks.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from sentinel_agent.check import local_part
from sentinel_agent.errors import Health, P, R
from sentinel_agent.naming import Naming
from sentinel_agent.replay.clock import Clock
from sentinel_agent.replay.contributions import read_contributions
from sentinel_agent.replay.feed import Feed
from sentinel_agent.replay.places import ModuleStack, user_locals
from sentinel_agent.replay.precision import Override
from sentinel_agent.replay.recording import Recording, flat_tensors
from sentinel_agent.replay.sinks import Sinks
from sentinel_agent.replay.tracer import Tracer
from sentinel_agent.replay.trial import Trial
from sentinel_agent.replay.weights import named, reshard, restore
from sentinel_agent.replay.world import World
from sentinel_agent.rng import restore as restore_rng
from sentinel_agent.roots import find_roots
from sentinel_agent.scan import Scan
from sentinel_agent.taps.wire import Call


class Phase(Enum):
    """Where a replay is."""

    BEFORE = auto()  # no process group yet
    FORWARD = auto()  # the script's own loop, on its way to the recorded round
    LIVE = auto()
    OVER = auto()


class Unguarded(Health):
    """In a replay there is no training to keep safe: a fault of ours is to be seen."""

    def guarded(self, site: str, function: Callable[P, R], *, even_off: bool = False) -> Callable[P, R | None]:
        """``function`` itself."""
        return function


class Session:
    """The replay of one trial. ``finish(session)`` is called at the end of the recorded round and must not return."""

    def __init__(self, recording: Recording, trial: Trial, finish: Callable[[Session], NoReturn]) -> None:
        self.recording = recording
        self.trial = trial
        self.phase = Phase.BEFORE
        self.modules = ModuleStack()
        self.feed = Feed(recording, trial.replaced, trial.by)
        self.override = Override(trial.precision)
        self.naming = Naming()
        self.scan = Scan(self.naming)
        self.clock = Clock(self.scan, self._round_closed)
        self.tracer = Tracer(self.modules, self.override.target)
        self.sinks = Sinks(self, recording)
        self.world = World(recording.header.rank, recording.header.world_size, self._reducing)
        self.world.peers = [read_contributions(path) for path in trial.peers]
        self.sinks.keep_contributions = trial.contributions is not None
        self.health = Unguarded(recording.header.rank, lambda _reason: None)
        self.notes: list[str] = []
        self.stopped_at = ""
        self.step_began = 0.0
        self.step_seconds = 0.0
        self.live_forwards = 0
        self._finish = finish
        self._restored_once = False

    # --- what the process tells ----------------------------------------------------------------------------------------

    def process_group_made(self) -> None:
        """The script has its (fake) process group. There is no round before the first, so that one begins here."""
        if self.phase is not Phase.BEFORE:
            return
        self.phase = Phase.FORWARD
        if self.recording.header.round == 0:
            self.go_live()

    def root_made(self, module: nn.Module) -> None:
        """A module that is trained, or a wrapper around one."""
        self.naming.add_root(module)

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was constructed."""
        if self.naming.add_optimizer(optimizer):
            for root in find_roots(optimizer):
                self.root_made(root)

    # --- on the way to the recorded round ------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """True inside the recorded round."""
        return self.phase is Phase.LIVE

    @property
    def forwarding(self) -> bool:
        """True before it."""
        return self.phase in (Phase.BEFORE, Phase.FORWARD)

    @property
    def fast(self) -> bool:
        """True if nothing is computed on the way that the recorded state replaces."""
        return self.trial.pace == "fast"

    def batch_wanted(self) -> bool:
        """A DataLoader is asked for a batch of training: is it answered with a recorded one?"""
        if self.phase is Phase.OVER or not self.feed.from_loader or not torch.is_grad_enabled():
            return False
        if self.forwarding:
            self.clock.jump(self.recording.header.round)
            self.go_live()
        return True

    def next_batch(self) -> Any:
        """The recorded batch; StopIteration if there is no more, which ends the script's loop."""
        if self.feed.loader_is_empty:
            self.stop("the script asked for more batches than the round had")
        with self.tracer.pause():
            batch = self.feed.next_batch()
        for number, tensor in enumerate(flat_tensors(batch)):
            self.tracer.arrived(tensor, f"tensor {number} of the batch")
        return batch

    def _round_closed(self, number: int, why: str) -> None:
        if self.live:
            self.stop(why)
        if number + 1 == self.recording.header.round:
            self.go_live()

    def go_live(self) -> None:
        """The recorded round begins here."""
        self.phase = Phase.LIVE
        self.world.restart()
        self.restore()
        state = self.recording.rng.get("round")
        if state is not None:
            restore_rng(state)
        if self.trial.anomaly:
            torch.autograd.set_detect_anomaly(True)
        self.step_began = time.perf_counter()
        if self.trial.traced:
            self.tracer.__enter__()  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        """Weights and buffers as they were when the round began."""
        if not any(True for _ in self.naming.parameters()):
            return
        with self.tracer.pause():
            reshard(self.naming)
            missing = restore(self.naming, self.recording.weights)
        for name, tensor in named(self.naming):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            self.tracer.arrived(tensor, f"{kind} {name}")
        if not self._restored_once and missing and self.recording.weights:
            self.notes.append(f"{len(missing)} parameters or buffers have no recorded counterpart, first {missing[0]}")
        self._restored_once = True

    # --- the live round ------------------------------------------------------------------------------------------------

    def forward_begins(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The outermost forward of a trained module is about to run, with gradients."""
        if self.trial.pace == "jump" and self.phase is Phase.FORWARD:
            self.clock.jump(self.recording.header.round)
            self.go_live()
        if not self.live:
            return args, kwargs
        if self.live_forwards == 0:
            self.restore()  # an optimizer whose step was under way may have written since
        self.live_forwards += 1
        self.modules.name(root)
        with self.tracer.pause():
            self.sinks.watch(self.naming)
            args, kwargs, changed = self.feed.forward_inputs(args, kwargs)
            if changed:
                self._substituted((args, kwargs))
            for number, tensor in enumerate(flat_tensors((args, kwargs))):
                self.tracer.entered(tensor, f"forward input {number}")
            if self.feed.replaces and self.feed.inputs != "fed":
                self.feed.replace([*flat_tensors((args, kwargs)), *flat_tensors(user_locals())])
        return args, kwargs

    def _substituted(self, value: Any) -> None:
        for number, tensor in enumerate(flat_tensors(value)):
            self.tracer.arrived(tensor, f"forward input {number}, as recorded")
        state = self.recording.rng.get(self.feed.rng_name())
        if state is not None:
            restore_rng(state)

    def backward_begins(self, tensors: Any) -> bool:
        """A backward is about to run; False if it is to be left out."""
        self.clock.backward_begins()
        if self.live:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            with self.tracer.pause():
                self.sinks.loss(roots)
            # A script's own would raise in the midst of the backward, with nothing to look at.
            torch.autograd.set_detect_anomaly(self.trial.anomaly)
            return True
        if self.phase is Phase.FORWARD and self.fast:
            self._fill_gradients()
            return False
        return True

    def backward_ended(self) -> None:
        """A backward has run, or was left out."""
        self.clock.backward_ended()

    def _fill_gradients(self) -> None:
        """Zeros where the script expects gradients, so that its own code between backward and step runs."""
        for _, parameter in self.naming.parameters():
            if parameter.requires_grad and parameter.is_leaf and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _reducing(self, call: Call, index: int) -> None:
        if not self.live:
            return
        parts = [part for tensor in call.inputs if (part := local_part(tensor)) is not None]
        with self.tracer.pause():
            self.sinks.wire(call, parts, index)

    def raised(self, error: BaseException) -> None:
        """The script raised; if nothing was nonfinite until then, what it leaves behind may be."""
        if self.live and not self.sinks.nonfinite:
            with self.tracer.pause():
                self.sinks.left_by(error)

    # --- the end -------------------------------------------------------------------------------------------------------

    def stop(self, why: str) -> NoReturn:
        """The recorded round is over: look at what came of it and end the process."""
        self.step_seconds = time.perf_counter() - self.step_began
        self.stopped_at = why
        if self.trial.traced and self.live:
            self.tracer.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.phase = Phase.OVER
        with self.tracer.pause():
            self.sinks.final(self.naming)
            self._finish(self)
