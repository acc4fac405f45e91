"""The in-process agent: taps, checks, ledger and dump. Import :func:`attach` for the one-line form.

Owns nothing itself; importing it must not import torch, since child processes without torch import it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sentinel_agent.process import attach, detach

__all__ = ["attach", "detach"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from sentinel_agent import process

        return getattr(process, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
