"""Tap on the ways a process ends: an exception nobody caught, ``sys.exit``, and the interpreter's own exit.

Owns the hooks. A script that looks at its loss and leaves, or dies in clipping, has its open round closed, and a nonfinite loss
that never reached a backward is found in the frames being left, or where the script goes on, in those that call its next forward.
Where there is none, because the loss function itself refused what it was given, NaN in a tensor with a history is what is told of
that forward.
"""

from __future__ import annotations

import atexit
import builtins
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from sentinel.wire.messages import Check
from sentinel_agent.check import EMPTY, check_one, local_part
from sentinel_agent.errors import Health, one_line
from sentinel_agent.patching import wrap

MAX_FRAMES = 32
MAX_TENSORS = 256  # looked at in the frames of an exception
MAX_ELEMENTS = 1 << 24  # of each
_at_exit: list[Callable[[], object]] = []
_since: Callable[[], int] = lambda: 0  # noqa: E731 - what install was given


def install(
    on_loss: Callable[[float], object],
    on_leaving: Callable[[str], None],
    on_exit: Callable[[], None],
    health: Health,
    on_value: Callable[[Check, str], object] = lambda _found, _where: None,
    since: Callable[[], int] = lambda: 0,
) -> None:
    """Call ``on_loss(value)`` for a nonfinite loss in the frames left, ``on_leaving(note)`` early, ``on_exit()`` at the end.

    ``since()`` is autograd's number from which a node is the open round's: what earlier rounds left (a perplexity beside the loss)
    is no loss of this one. ``on_value(found, where)`` is called where an exception leaves no such loss, but another tensor with NaN
    and a history.
    """
    global _since
    _since = since
    look = health.guarded("leaving", lambda frames, note: _look(frames(), note(), on_loss, on_leaving, on_value))
    wrap(sys, "excepthook", lambda original: _excepthook(original, look))
    wrap(sys, "exit", lambda original: _exit(original, "sys.exit", look))
    wrap(builtins, "exit", lambda original: _exit(original, "exit", look))
    wrap(builtins, "quit", lambda original: _exit(original, "quit", look))
    exits = health.guarded("exit", on_exit, even_off=True)
    last_look = health.guarded("leaving", lambda: _look_at_script(on_loss, on_leaving))
    _at_exit.append(lambda: (last_look(), exits()))
    atexit.register(_at_exit[-1])


def uninstall() -> None:
    """Forget what was registered for the interpreter's exit; the hooks are put back with the other patches."""
    while _at_exit:
        atexit.unregister(_at_exit.pop())


def _excepthook(original: Callable[..., Any], look: Callable[..., Any]) -> Callable[..., Any]:
    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        look(lambda: list(frames_of(traceback)), lambda: one_line(error))
        return original(kind, error, traceback)

    return excepthook


def _exit(original: Callable[..., Any], name: str, look: Callable[..., Any]) -> Callable[..., Any]:
    def leave(*args: Any) -> Any:
        frame = sys._getframe(1)
        look(lambda: list(_callers(frame)), lambda: "" if _is_success(args) else f"{name}({args[0]})"[:150])
        return original(*args)

    return leave


def _is_success(args: tuple[Any, ...]) -> bool:
    """``sys.exit()``, ``sys.exit(0)``: how a healthy main ends."""
    return not args or args[0] is None or args[0] == 0


def frames_of(traceback: TracebackType | None) -> Iterator[FrameType]:
    """Frames of an uncaught exception, outermost first."""
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def loss_passed_over(on_loss: Callable[[float], object]) -> None:
    """Call ``on_loss(value)`` for a loss of NaN that the callers of the next forward still hold, with no backward between."""
    held = (v for frame in _callers(sys._getframe(1)) for v in _nonfinite_losses(frame))
    value = next((v for v in held if math.isnan(v)), None)  # infinity may be a perplexity
    if value is not None:
        on_loss(value)


def _look(
    frames: list[FrameType],
    note: str,
    on_loss: Callable[[float], object],
    on_leaving: Callable[[str], None],
    on_value: Callable[[Check, str], object],
) -> None:
    value = next((v for frame in frames for v in _nonfinite_losses(frame)), None)
    told = value is not None and on_loss(value)
    if value is None and note:
        found = next(nan_left(frames), None)
        told = found is not None and on_value(found[1], found[2])
    if note or told:
        on_leaving(note or "the script ended with a nonfinite loss")


def _look_at_script(on_loss: Callable[[float], object], on_leaving: Callable[[str], None]) -> None:
    """At the very end: a script that left its loop over a nonfinite loss still holds it in a global of ``__main__``."""
    script = sys.modules.get("__main__")
    value = next(_nonfinite_values(list(vars(script).values()) if script is not None else []), None)
    if value is not None and on_loss(value):
        on_leaving("the script ended with a nonfinite loss")


def _nonfinite_losses(frame: FrameType) -> Iterator[float]:
    """Values of one-element tensors that a backward could be called on (they have a history) and that are nonfinite."""
    return _nonfinite_values(list(frame.f_locals.values()))


def nan_left(frames: list[FrameType]) -> Iterator[tuple[torch.Tensor, Check, str]]:
    """Tensors of several elements that were computed from parameters and hold NaN, and where. Infinities may be masks."""
    held = ((frame, name, one) for frame in frames for name, one in list(frame.f_locals.items()))
    tensors = ((f, n, t) for f, n, t in held if type(t) is torch.Tensor and t.grad_fn is not None and t.numel() > 1)
    for frame, name, tensor in itertools.islice(tensors, MAX_TENSORS):
        part = local_part(tensor) if tensor.numel() <= MAX_ELEMENTS else None
        found = check_one(part) if part is not None else EMPTY
        if found.nan:
            yield (
                tensor,
                found,
                f"{name} in {frame.f_code.co_name}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}",
            )


def _nonfinite_values(values: list[object]) -> Iterator[float]:
    for one in values:
        if type(one) is torch.Tensor and one.numel() == 1 and one.grad_fn is not None and one.is_floating_point():
            if one.grad_fn._sequence_nr() < _since():
                continue
            value = float(one.detach())
            if not math.isfinite(value):
                yield value
