"""One training process's agent: its parts, wired to each other and to the taps.

Owns the wiring and the agent's life from attach to goodbye. What the parts do is written in their own files.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sentinel import __version__
from sentinel.wire.messages import Command, Disabled, DumpRequest, Goodbye, Guarded, Hello, Report
from sentinel_agent.agreement import Agreement
from sentinel_agent.channel import Channel
from sentinel_agent.check import Checker
from sentinel_agent.config import AgentConfig
from sentinel_agent.errors import Health
from sentinel_agent.evidence import Evidencing
from sentinel_agent.guard import Budget, Guard
from sentinel_agent.halting import NonFiniteGradientError, halt, unmark
from sentinel_agent.identity import Identity
from sentinel_agent.ledger import Ledger
from sentinel_agent.moments import Moments
from sentinel_agent.naming import Naming
from sentinel_agent.patching import restore
from sentinel_agent.roots import find_roots, find_trained
from sentinel_agent.rounds import Round
from sentinel_agent.scan import Scan
from sentinel_agent.stopwatch import Stopwatch
from sentinel_agent.taps import batches, clip, comm_hook, join, leaving, loss, optimizer, wire
from sentinel_agent.taps.audit import Audit
from sentinel_agent.taps.scaler import ScalerTap
from sentinel_agent.taps.termination import Termination
from sentinel_agent.taps.withheld import Withheld
from sentinel_agent.window import Window


class Agent:
    """The agent of one rank. Make it once the rank is known; ``start`` installs the taps."""

    def __init__(self, config: AgentConfig, rank: int, world_size: int) -> None:
        self.config = config
        self.health = Health(rank, self._disabled, Stopwatch(running=config.timers))
        self.me = Identity(rank, world_size, config.attempt, config.node, self.health)
        self.naming = Naming()
        self.scan = Scan(self.naming)
        self.checker = Checker(delay=config.check_delay)
        self.window = Window(config.window_rounds, config.window_bytes, config.clone_below)
        self.termination = Termination(self._terminated, self.health)
        self.evidencing = Evidencing(
            self.me,
            config,
            self.window,
            self.naming,
            self.send,
            scaler_state=lambda: self.scaler.state(),
            replicated=lambda: self.ledger.replicas.everywhere(),
            held=self.termination.held,
            layer_norms=lambda: self.ledger.reductions.norms.table(),
        )
        self.agreement = Agreement(rank, world_size, config.attempt)
        budget = Budget(config.max_skips, config.max_skips_total)
        self.guard = Guard(config.guard, budget, self.health, self.agreement.everyone)
        self.withheld = Withheld()
        self.ledger = Ledger(
            self.me, self.checker, self.scan, self.send, self.evidencing.suspicious, self._round_closed, self.guard
        )
        self.moments = Moments(self.naming, self.ledger)
        self.scaler = ScalerTap(self, self.health)
        self.channel = Channel(
            config.relay or "",
            identity=(config.attempt, rank, config.node),
            key=config.command_key,
            health=self.health,
            on_command=self._command,
            alive_seconds=config.alive_seconds,
        )
        self.audit = Audit(self.ledger.overflowed, self.health, self.naming.module_name, allowed=config.audit)
        self._first_forward_due = True
        self._searches_left = 3  # for the modules of a loop with neither wrapper nor optimizer; each walks all objects
        self._last_closed = (-1, 0)
        self._halted = False
        self._clean = True
        self._note = ""

    def start(self) -> None:
        """Open the channel, say hello, install every tap."""
        if self.config.relay:
            self.channel.start()
        self.send(self._hello())
        guarded = self.health.guarded
        self._look = guarded("wire", self._maybe_fail("wire", self.ledger.reductions.before))
        self.before = self._look_and_note if self.guard.acts else self._look
        self._scattered = guarded("agreement", self.agreement.before, even_off=True)
        self.after = guarded("wire_result", self.ledger.reductions.after)
        wire.install(self)
        comm_hook.install(dist)
        join.install(nn.parallel.distributed, self.ledger.shadowed, self.health)
        stepping = self._optimizer_steps, self._optimizer_made
        optimizer.install(*stepping, self.health, self._intervene, self._optimizer_stepped)
        self.scaler.install()
        told = (self.ledger.loss, self._backward_begins, self._backward_ended)
        loss.install(
            *told, self.scaler.unscaled, self.health, self._agree if self.guard.acts else None, self.ledger.anomaly
        )
        clip.install(
            self._clipping, self._clipped, self.ledger.pending.join, self.ledger.handover.unscaled, self.health
        )
        batches.install_loader_tap(lambda: self if self.health.active else None, guarded)
        if self.config.audit:
            batches.on_forward_end(guarded("forward_end", self.audit.forward_ended, even_off=True))
        left = self.ledger.loss_left_behind, self._leaving, self.goodbye
        leaving.install(*left, self.health, self.ledger.value_left_behind, lambda: self.ledger.since)
        self.termination.install()
        os.register_at_fork(after_in_child=self._forked)

        if self.guard.acts:
            guarded("announce", self.agreement.announce)()

    # --- what the taps feed --------------------------------------------------------------------------------------------

    def _look_and_note(self, read: wire.Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The wire tap's call; what ranks agree by is noted whatever becomes of the rest."""
        self._scattered(read, args, kwargs)
        return self._look(read, args, kwargs)

    def root_made(self, module: nn.Module) -> None:
        """A module that is being trained, or a wrapper around one."""
        if self.naming.add_root(module):
            batches.watch_root(module)
            self.ledger.layouts.learn(self.naming.parameters())
            if isinstance(module, nn.parallel.DistributedDataParallel):
                group = module.process_group
                self.ledger.reductions.buckets.add(module)
                self.ledger.replicas.replicate(group.group_name, group.size(), self._replicated(module))

    def _replicated(self, wrapper: nn.parallel.DistributedDataParallel) -> list[tuple[str, torch.Tensor]]:
        """What a DDP keeps equal over its group: trained parameters, less those it was told to ignore."""
        ignored = set(wrapper.parameters_to_ignore)
        kept = {id(p) for n, p in wrapper.module.named_parameters() if p.requires_grad and n not in ignored}
        return [(name, p) for name, p in self.naming.parameters() if id(p) in kept]

    def before_batch(self) -> Any:
        """RNG states before a DataLoader makes its next batch."""
        return self.window.before_batch()

    def loader_batch(self, batch: object, sample_indices: Any = None, rng: Any = None) -> None:
        """A DataLoader returned a batch."""
        self.ledger.clock.batch_fetched()
        self.window.loader_batch(batch, sample_indices, rng)

    def forward_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The outermost root runs; the very first time its parameters are looked at."""
        self._first_forward()
        if torch.is_grad_enabled():
            if self.ledger.unanswered:
                leaving.loss_passed_over(self.ledger.loss_left_behind)
            self.ledger.round.forward_begins()
            self.audit.forward_begins(self.ledger.round.number)
        self.scaler.autocast_dtype = autocast_dtype()
        self.window.forward_inputs(args, kwargs)

    def _first_forward(self) -> None:
        if self._first_forward_due and torch.is_grad_enabled():
            self._first_forward_due = False
            self.scan.remember_buffers()
            self.evidencing.training_begins()
            self.ledger.start_checked(self.scan.start())

    def _agree(self) -> None:
        """After a backward that scattered gradients: what any rank saw in its shard, all ranks know."""
        if not self.agreement.due:
            return
        if self.health.active:
            self.health.guarded("join", self.ledger.pending.join)()
        open_round = self.ledger.round
        seen, covered = self.agreement.reach(open_round.shared_nonfinite)
        open_round.shared_nonfinite |= seen
        open_round.private |= not covered

    def _backward_begins(self) -> None:
        self.withheld.give_back()  # of a step that raised
        self._first_forward()
        self.ledger.backward_begins()

    def _backward_ended(self) -> None:
        if not self.naming.known and self._searches_left:
            self._searches_left -= 1
            for root in find_trained():
                self.root_made(root)
        self.ledger.backward_ended()

    def _optimizer_made(self, made: torch.optim.Optimizer) -> None:
        if self.naming.add_optimizer(made):
            for root in find_roots(made):
                self.root_made(root)
            self.ledger.layouts.learn(self.naming.parameters())

    def _optimizer_steps(self, stepping: torch.optim.Optimizer, again: bool) -> Guarded:
        if self.naming.add_optimizer(stepping):
            self.ledger.layouts.learn(self.naming.parameters())
        scale, skipped = self.scaler.about_to_step(stepping)
        self.moments.stepping(self.ledger.round)
        decision = self.ledger.optimizer_steps(stepping, scale=scale, skipped=skipped, again=again)
        if self._halted and decision is not Guarded.HALTED:
            self._halted = False
            self.health.guarded("halt_mark", unmark)(self.config.run_dir)
        return decision

    def _optimizer_stepped(self, stepped: torch.optim.Optimizer) -> None:
        self.ledger.written.stepped(stepped)
        self.moments.stepped(stepped)

    def _intervene(self, decision: Guarded, stepping: torch.optim.Optimizer, inside: bool) -> None:
        """Leave this step out, or end the training by raising into it."""
        if decision is Guarded.SKIPPED:
            self.health.guarded("withhold", self.withheld.take if inside else self.withheld.arm)(stepping)
            return
        self._halted, me = True, self.me
        missing = halt(self.config.run_dir, me.attempt, me.rank, me.world_size, self._last_closed, self.health)
        raise NonFiniteGradientError(self._last_closed[1], missing)

    def scaler_skipped(self, optimizer: torch.optim.Optimizer, scale: float | None) -> None:
        """A GradScaler left the step of ``optimizer`` out."""
        self.ledger.optimizer_steps(optimizer, scale=scale, skipped=True)

    def misused(self, note: str, optimizer: torch.optim.Optimizer | None) -> None:
        """A call in a wrong order."""
        self.ledger.misused(note)

    def _clipping(self, parameters: list[torch.Tensor]) -> None:
        self.ledger.handover.clipping(parameters)
        self.scaler.clipping(parameters, self.naming.optimizers())

    def _clipped(self, parameters: list[torch.Tensor], norm: Any) -> None:
        self.ledger.handover.clipped(parameters, norm)

    def _round_closed(self, closing: Round, step: int) -> None:
        self._last_closed = (closing.number, step)
        if self.guard.decision is Guarded.SKIPPED:
            self.evidencing.restore_buffers()
        self.evidencing.closed(closing, step)
        self.scaler.round_closed()
        self.window.close_round(closing.number)
        self.ledger.layouts.forget_gradients()  # a loop with no backward (torch.func) makes its own

    # --- out and back --------------------------------------------------------------------------------------------------

    def send(self, report: Report) -> None:
        """Queue a report."""
        self.channel.send(report)

    def _command(self, command: Command) -> None:
        if isinstance(command, DumpRequest):
            self.health.guarded("requested_dump", self.evidencing.requested)(command)

    def _hello(self) -> Hello:
        return Hello(
            attempt=self.me.attempt,
            rank=self.me.rank,
            local_rank=self.config.local_rank,
            node=self.me.node,
            world_size=self.me.world_size,
            pid=os.getpid(),
            host=self.config.host,
            agent_version=__version__,
            torch_version=str(torch.__version__),
            at=time.time(),
        )

    # --- the end -------------------------------------------------------------------------------------------------------

    def _leaving(self, note: str) -> None:
        self._clean, self._note = False, note
        self.ledger.leaving(note)

    def _terminated(self, note: str) -> None:
        """SIGTERM: what there is is told, nobody is waited for."""
        self._leaving(note)
        self.channel.send(Goodbye(self.me.attempt, self.me.rank, self.ledger.last_closed, False, note))
        self.channel.close()

    def goodbye(self) -> None:
        """Close the open round, say goodbye and wait a moment for the coordinator to have judged everything."""
        if self.health.active:
            self.ledger.leaving("")
        self.health.drops.update(self.window.drops)
        self.window.drops.clear()
        bye = Goodbye(self.me.attempt, self.me.rank, self.ledger.last_closed, self._clean, self._note)
        self.channel.goodbye(bye, self.config.goodbye_seconds)

    def stop(self) -> None:
        """Take every tap out and say goodbye, in a process that goes on."""
        self.goodbye()
        self.health.active = False
        wire.uninstall()
        optimizer.uninstall()
        self.withheld.uninstall()
        batches.uninstall()
        leaving.uninstall()
        self.termination.uninstall()
        restore()

    def _disabled(self, reason: str) -> None:
        self.send(Disabled(self.me.attempt, self.me.rank, reason))

    def _forked(self) -> None:
        self.health.active = False
        self.channel.forget()

    def _maybe_fail(self, site: str, function: Any) -> Any:
        """For tests of the latch: a tap that raises each time it is called."""
        if self.config.fail_at != site:
            return function

        def fail(*_args: Any, **_kwargs: Any) -> None:
            raise RuntimeError("a fault planted by a test")

        return fail


def autocast_dtype() -> torch.dtype | None:
    """The dtype autocast would cast to here, None where it is off."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def ranks() -> tuple[int, int]:
    """(rank, world size) of the default process group."""
    return dist.get_rank(), dist.get_world_size()
