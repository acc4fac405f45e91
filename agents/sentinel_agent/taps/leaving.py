"""Tap on the ways a process ends: an exception nobody caught, ``sys.exit``, and the interpreter's own exit.

Owns the hooks. A script that looks at its loss and leaves, or dies in clipping, has its open round closed, and a nonfinite loss
that never reached a backward is found in the frames being left.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

from sentinel_agent.errors import Health
from sentinel_agent.patching import wrap

MAX_FRAMES = 32


def install(
    on_loss: Callable[[float], None], on_leaving: Callable[[str], None], on_exit: Callable[[], None], health: Health
) -> None:
    """Call ``on_loss(value)`` for a nonfinite loss in the frames left, ``on_leaving(note)`` early, ``on_exit()`` at the end."""
    look = health.guarded("leaving", lambda frames, note: _look(frames, note, on_loss, on_leaving))
    wrap(sys, "excepthook", lambda original: _excepthook(original, look))
    wrap(sys, "exit", lambda original: _exit(original, look))
    atexit.register(health.guarded("exit", on_exit))


def _excepthook(original: Callable[..., Any], look: Callable[..., Any]) -> Callable[..., Any]:
    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        look(list(_frames_of(traceback)), f"{kind.__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}")
        return original(kind, error, traceback)

    return excepthook


def _exit(original: Callable[..., Any], look: Callable[..., Any]) -> Callable[..., Any]:
    def leave(*args: Any) -> Any:
        look(list(_callers(sys._getframe(1))), f"sys.exit({args[0] if args else ''})"[:150])
        return original(*args)

    return leave


def _frames_of(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _look(
    frames: list[FrameType], note: str, on_loss: Callable[[float], None], on_leaving: Callable[[str], None]
) -> None:
    value = next((v for frame in frames for v in _nonfinite_losses(frame)), None)
    if value is not None:
        on_loss(value)
    on_leaving(note)


def _nonfinite_losses(frame: FrameType) -> Iterator[float]:
    """Values of one-element tensors that a backward could be called on (they have a history) and that are nonfinite."""
    for local in list(frame.f_locals.values()):
        if (
            type(local) is torch.Tensor
            and local.numel() == 1
            and local.grad_fn is not None
            and local.is_floating_point()
        ):
            value = float(local.detach())
            if value != value or value in (float("inf"), float("-inf")):
                yield value
