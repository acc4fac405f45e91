"""The in-process agent: taps, checks, ledger and dump. Import :func:`attach` for the one-line form.

Owns nothing itself; importing it must not import torch, since child processes without torch import it too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sentinel_agent.halting import NonFiniteGradientError
    from sentinel_agent.process import attach, detach

__all__ = ["NonFiniteGradientError", "attach", "detach"]
_HOMES = {"NonFiniteGradientError": "halting", "attach": "process", "detach": "process"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"sentinel_agent.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
