"""Replacing a function of torch by a wrapper of it, once, and putting it back.

Owns the list of replacements of this process, so that ``uninstall`` leaves torch as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_replaced: list[tuple[Any, str, Any, Any]] = []


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
    """Replace ``owner.name`` by ``make(original)``. False if it is missing or already ours."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "_sentinel", False):
        return False
    replacement = functools.wraps(original)(make(original))
    vars(replacement)["_sentinel"] = True
    setattr(owner, name, replacement)
    _replaced.append((owner, name, original, replacement))
    return True


def restore() -> None:
    """Put back everything that is still in place; what somebody wrapped after us stays."""
    while _replaced:
        owner, name, original, replacement = _replaced.pop()
        if getattr(owner, name, None) is replacement:
            setattr(owner, name, original)
