"""Replacing a function of torch by a wrapper of it, once, and putting it back.

Owns the list of replacements of this process, so that ``uninstall`` leaves torch as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_replaced: list[tuple[Any, str, Any, Any, bool]] = []  # owner, name, original, replacement, was it the owner's own name


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
    """Replace ``owner.name`` by ``make(original)``. False if it is missing or already ours."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "_sentinel", False):
        return False
    replacement = functools.wraps(original)(make(original))
    vars(replacement)["_sentinel"] = True
    own = name in vars(owner)
    setattr(owner, name, replacement)
    _replaced.append((owner, name, original, replacement, own))
    return True


def alias(owner: Any, name: str, original: Any, replacement: Any) -> bool:
    """Another name of a function that was wrapped: it, too, becomes the replacement. False if it is something else."""
    if getattr(owner, name, None) is not original:
        return False
    setattr(owner, name, replacement)
    _replaced.append((owner, name, original, replacement, True))
    return True


def restore() -> None:
    """Put back everything that is still in place; what somebody wrapped after us stays."""
    while _replaced:
        owner, name, original, replacement, own = _replaced.pop()
        if getattr(owner, name, None) is not replacement:
            continue
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
