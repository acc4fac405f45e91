"""Doing something right after a module was imported, without importing it.

Owns one finder on ``sys.meta_path``. Processes that never import a watched module pay one dictionary look-up per import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Callback = Callable[[ModuleType], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``callbacks[name](module)`` once module ``name`` has run."""

    def __init__(self, callbacks: dict[str, Callback]) -> None:
        self._callbacks = dict(callbacks)
        self._looking: set[str] = set()  # a second finder of ours asks this one, too

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with its loader told to call back; None for modules that are not watched."""
        if fullname not in self._callbacks or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            return self._watched_spec(fullname, path, target)
        finally:
            self._looking.discard(fullname)

    def _watched_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Calling(spec.loader, lambda module: self._ran(fullname, module))
                return spec
        return None

    def _ran(self, fullname: str, module: ModuleType) -> None:
        """The module has run without an error: call back, once. A mere look at its spec, or a failed import, is neither."""
        callback = self._callbacks.pop(fullname, None)
        if callback is not None:
            callback(module)


class _Calling(importlib.abc.Loader):
    """A loader that runs another's and then calls back. Everything else about the module stays the other's."""

    def __init__(self, inner: importlib.abc.Loader, callback: Callback) -> None:
        self._inner = inner
        self._callback = callback

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._callback(module)


def after_import(callbacks: dict[str, Callback]) -> None:
    """Register callbacks for modules not imported yet; call at once for those that are."""
    waiting = {}
    for name, callback in callbacks.items():
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            callback(module)
        else:
            waiting[name] = callback
    if waiting:
        sys.meta_path.insert(0, AfterImport(waiting))


def forget_imports() -> None:
    """Wait for no import any longer."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AfterImport)]
