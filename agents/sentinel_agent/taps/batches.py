"""Tap on what a training step is fed: batches of any torch DataLoader, and the inputs and output of the outermost forward.

Owns the patch of the loader's iterator and what the hooks on root modules do. What is kept is the window's business; which
modules are roots, ``roots.py`` finds out. Every call out of here goes through the guard given at install, so nothing is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.utils.data import dataloader

from sentinel_agent.errors import Health
from sentinel_agent.patching import wrap
from sentinel_agent.taps.watched import WatchedModules

OutputCallback = Callable[[nn.Module, Any], None]


class Batches(Protocol):
    """What the tap feeds; ``window.Window`` is one."""

    def before_batch(self) -> Any:
        """RNG states before the loader makes its next batch."""

    def loader_batch(self, batch: object, sample_indices: tuple[Any, ...] | None = None, rng: Any = None) -> None:
        """A DataLoader returned ``batch``."""

    def forward_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The outermost root is about to run with these inputs."""


class Guard(Protocol):
    """Makes a function that never raises of one that may; ``errors.Health.guarded`` is one."""

    def __call__(self, site: str, function: Callable[..., Any], /) -> Callable[..., Any]:
        """``function``, with its faults caught and counted under ``site``."""


class _Taps:
    """What is installed in this process. Hooks find it here and hold nothing themselves, so that modules stay copyable."""

    def __init__(self) -> None:
        self.provider: Callable[[], Batches | None] = _no_window
        self.outputs: list[OutputCallback] = []
        self.ends: list[Callable[[], object]] = []
        self.roots = WatchedModules(_before_forward, _after_forward)
        self.use(Health(-1, lambda _reason: None).guarded)

    def use(self, guard: Guard) -> None:
        self.guard = guard
        self.before = guard("loader", _before)
        self.caught = guard("loader", _caught)
        self.remember = guard("indices", _remember)
        self.inputs = guard("forward", _inputs)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.roots: list[nn.Module] = []  # watched modules whose forward is running, outermost first
        self.inside_loader = False


def _no_window() -> None:
    return None


_ITERATOR: Final = dataloader._BaseDataLoaderIter
_INDICES: Final = "_sentinel_sample_indices"


def install_loader_tap(window_provider: Callable[[], Batches | None], guard: Guard | None = None) -> None:
    """Watch every DataLoader of this process. A provider that returns None switches the taps off for the moment.

    A second call only replaces provider and guard. Root modules are watched with ``watch_root`` and share both.
    """
    _taps.provider = window_provider
    if guard is not None:
        _taps.use(guard)
    wrap(_ITERATOR, "__next__", _watched_next)
    wrap(_ITERATOR, "_next_index", _watched_next_index)


def uninstall() -> None:
    """Take the hooks off and see nothing any more; the patches pass calls through until ``patching.restore``."""
    _taps.provider = _no_window
    _taps.outputs.clear()
    _taps.ends.clear()
    _taps.roots.clear()


def on_output(callback: OutputCallback) -> None:
    """Call ``callback(module, output)`` after each outermost forward of a root with gradients enabled."""
    _taps.outputs.append(_taps.guard("output", callback))


def on_forward_end(callback: Callable[[], object]) -> None:
    """Call ``callback()`` after each outermost forward of a root, however it ended. It must not raise."""
    _taps.ends.append(callback)


def watch_root(module: nn.Module) -> bool:
    """Watch a root's forward, and that of the module it merely wraps, in case a script calls the inner one.

    Only the outermost forward counts. False if nothing was added: the module is known, or compiled in place, in which case
    hooks would be compiled too and see nothing.
    """
    _taps.roots.follow()
    added = _taps.roots.add(module)
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        added = _taps.roots.add(module.module) or added
    return added


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    _enter(module, args, kwargs)


def _after_forward(module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _leave(module, output)


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if module not in _taps.roots:
        return  # a copy that took the hooks along, such as a replica of nn.DataParallel
    running = _thread.roots
    if running and running[0] is module:
        running.clear()  # its last forward never told us that it ended (an interrupt): start afresh
    running.append(module)
    window = _taps.provider()
    if len(running) == 1 and window is not None and not _replayed_by_torch():
        _taps.inputs(window, args, kwargs)


def _inputs(window: Batches, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    window.forward_inputs(args, kwargs)


def _leave(module: nn.Module, output: Any) -> None:
    running = _thread.roots
    if not running or running[-1] is not module:
        return
    running.pop()
    if not running:
        for ended in _taps.ends:
            ended()
    if running or output is None or not torch.is_grad_enabled():  # there is no output if the forward raised
        return
    if _taps.provider() is None or _replayed_by_torch():
        return
    for callback in _taps.outputs:
        callback(module, output)


def _replayed_by_torch() -> bool:
    """True where a forward is not the script's own: recomputed inside backward by a checkpoint, or traced."""
    return torch._C._current_graph_task_id() != -1 or torch._C._get_tracing_state() is not None


def _watched_next(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def __next__(self: Any) -> Any:
        window = _taps.provider()
        if window is None or _thread.inside_loader:  # a dataset may itself read from a loader
            return original(self)
        rng = _taps.before(window)
        _thread.inside_loader = True
        try:
            batch = original(self)
        finally:
            _thread.inside_loader = False
        _taps.caught(window, self, batch, rng)
        return batch

    return __next__


def _before(window: Batches) -> Any:
    return window.before_batch()


def _caught(window: Batches, iterator: Any, batch: object, rng: Any) -> None:
    window.loader_batch(batch, _indices_of(iterator), rng=rng)


def _watched_next_index(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def _next_index(self: Any) -> Any:
        index = original(self)  # raises StopIteration
        if _taps.provider() is not None:
            _taps.remember(self, index)
        return index

    return _next_index


def _remember(iterator: Any, index: Any) -> None:
    """Workers are sent indices several batches ahead: keep them under the number of the task they are sent as."""
    if iterator._dataset_kind != dataloader._DatasetKind.Map:
        return  # an iterable dataset has no indices
    pending = vars(iterator).setdefault(_INDICES, {})
    pending[getattr(iterator, "_send_idx", 0)] = tuple(index) if isinstance(index, (list, tuple)) else (index,)


def _indices_of(iterator: Any) -> tuple[Any, ...] | None:
    """Indices of the batch just returned; None where batches may come in another order than they were asked for."""
    pending = vars(iterator).get(_INDICES)
    if pending is None or not getattr(iterator, "_in_order", True):
        return None
    indices: tuple[Any, ...] | None = pending.pop(getattr(iterator, "_rcvd_idx", 1) - 1, None)
    return indices


_taps = _Taps()
_thread = _Thread()
