"""What of a batch may be written to a disk: the user's own function decides, value by value.

Owns calling it. It is given copies, so that it cannot change what the training computes with; if it fails once it is not asked
again, and nothing that it would have been asked about is written.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

from torch import Tensor

from sentinel_agent.capture import Branch, Captured, Drop, Omitted
from sentinel_agent.errors import Health

V = TypeVar("V", Tensor, str, bytes)

REDACTED: Final = Drop.REDACTED


class Redaction:
    """The function ``module:function`` of the user's, imported when it is first needed; '' for none.

    It is called as ``function(name, value)`` with each tensor (numpy arrays as tensors), string and bytes of a batch, and returns
    what is to be written instead, or None for nothing.
    """

    def __init__(self, target: str = "", health: Health | None = None) -> None:
        self._target = target
        self._failed = False
        health = health or Health(-1, lambda _reason: None)
        self._guarded = health.guarded("redaction", self._ask, even_off=True)

    @property
    def active(self) -> bool:
        """True if there is a function to ask."""
        return bool(self._target)

    def tensor(self, name: str, tensor: Tensor) -> Tensor | None:
        """What to write of a tensor; the tensor itself if nobody is to be asked."""
        return self._guarded(name, tensor.detach().clone(), Tensor) if self.active else tensor

    def texts(self, captured: Captured, path: str) -> Any:
        """The tree of a captured value with its strings and bytes as they may be written."""
        return self._texts(captured.tree, path) if self.active else captured.tree

    def _texts(self, node: Any, path: str) -> Any:
        if isinstance(node, str | bytes):
            kind: Any = str if isinstance(node, str) else bytes
            text = self._guarded(path, node, kind)
            return Omitted(REDACTED, kind.__name__) if text is None else text
        if isinstance(node, Branch):
            keys = range(len(node.children)) if node.keys is None else node.keys
            pairs = zip(keys, node.children, strict=True)
            children = tuple(self._texts(child, f"{path}.{key}") for key, child in pairs)
            return Branch(node.kind, children, node.keys, node.type_name)
        return node

    def _ask(self, name: str, value: V, kind: type[V]) -> V | None:
        if self._failed:
            return None
        self._failed = True  # unless it comes back
        answer = self._function()(name, value)
        if answer is not None and not isinstance(answer, kind):
            raise TypeError(f"{self._target} returned {type(answer).__name__} for {name}, not {kind.__name__} or None")
        self._failed = False
        return answer

    def _function(self) -> Callable[[str, Any], Any]:
        module, _, function = self._target.partition(":")
        found: Callable[[str, Any], Any] = getattr(importlib.import_module(module), function)
        return found
