"""Tap on DDP's communication hooks: which collectives a user's hook issues, and for whose gradients.

Owns the patch of the function through which every Python hook is registered, before or after the first backward. The hook is
called with the very arguments it was given, so its results are untouched; what it issues on this thread is a gradient's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from sentinel_agent.patching import wrap


class _Thread(threading.local):
    bucket: Any = None
    issued = 0  # collectives of the hook that is running


_here = _Thread()


def running() -> bool:
    """Is a communication hook running on this thread?"""
    return _here.bucket is not None


def parameters() -> list[Any]:
    """Parameters of the bucket whose hook is running on this thread."""
    return list(_here.bucket.parameters()) if _here.bucket is not None else []


def issues() -> bool:
    """The hook that is running on this thread issues a gradient's collective. True if it has issued one before for this bucket.

    A future that is done already runs what is chained to it at once, inside of the hook.
    """
    if _here.bucket is None:
        return False
    _here.issued += 1
    return _here.issued > 1


def install(module: Any) -> None:
    """Patch ``_register_comm_hook`` where DDP looks it up: in ``torch.distributed``."""
    wrap(module, "_register_comm_hook", _register)


def _register(original: Callable[..., Any]) -> Callable[..., Any]:
    def register(reducer: Any, state: Any, hook: Callable[..., Any]) -> Any:
        return original(reducer, state, _noted(hook))

    return register


def _noted(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def call(state: Any, bucket: Any) -> Any:
        outer = _here.bucket, _here.issued
        _here.bucket, _here.issued = bucket, 0
        try:
            return hook(state, bucket)
        finally:
            _here.bucket, _here.issued = outer

    return call
