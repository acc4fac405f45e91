"""The modules whose forward is watched, and the care that our hooks stay with them.

Owns registration. Hooks are part of a module, so without care they would go wherever a module goes: into a deep copy kept
for averaging, into a whole model that a user saves and loads where this package is not installed, into TorchScript, which
cannot compile them. What the hooks do is in ``batches.py``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.jit._script as scripting
from torch import nn
from torch.utils.hooks import RemovableHandle

from sentinel_agent.patching import wrap

Hook = Callable[..., None]

_HOOK_DICTS: Final = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_always_called",
)


class WatchedModules:
    """Watched modules of this process, held weakly. ``before(module, args, kwargs)`` and ``after(module, args, output)``
    run around the forward of each, ``after`` even when it raises.
    """

    def __init__(self, before: Hook, after: Hook) -> None:
        self._hooks = (_Hook(before), _Hook(after))
        self._handles: dict[int, tuple[weakref.ref[nn.Module], tuple[RemovableHandle, ...]]] = {}

    def __contains__(self, module: nn.Module) -> bool:
        known = self._handles.get(id(module))
        return known is not None and known[0]() is module

    def add(self, module: nn.Module) -> bool:
        """Watch ``module``; False if it is watched, or compiled in place: then hooks would be compiled too and see nothing."""
        if module in self or getattr(module, "_compiled_call_impl", None) is not None:
            return False
        self._register(module)
        return True

    def clear(self) -> None:
        """Take all hooks off."""
        for _, handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    def follow(self) -> None:
        """Patch what copies, pickles and scripts modules, to see them without our hooks; and watch what compiles them instead."""
        wrap(nn.Module, "__getstate__", self._state_without_hooks)
        wrap(scripting, "_script_impl", self._script_without_hooks)
        wrap(torch, "compile", self._watching_compiled)

    def _watching_compiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile_(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            # Inside the compiled region our hooks come to nothing, so watch the module around it.
            compiled = original(model, *args, **kwargs)
            if (
                isinstance(compiled, nn.Module)
                and compiled is not model
                and any(one in self for one in model.modules())
            ):
                self.add(compiled)
            return compiled

        return compile_

    def _register(self, module: nn.Module) -> None:
        before, after = self._hooks
        handles = (
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        )
        self._handles[id(module)] = (weakref.ref(module), handles)

    def _state_without_hooks(self, original: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
        def __getstate__(module: nn.Module) -> Any:
            state = original(module)
            if module not in self or not isinstance(state, dict):
                return state
            ours = {handle.id for handle in self._handles[id(module)][1]}
            for name in _HOOK_DICTS:
                hooks = state.get(name)
                if hooks is not None:
                    state[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in ours)
            return state

        return __getstate__

    def _script_without_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _script_impl(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
            # It looks for the user's frame so many frames above itself; this function is one more.
            with self._unhooked(obj):
                return original(obj, optimize, _frames_up + 1, *args, **kwargs)

        return _script_impl

    @contextlib.contextmanager
    def _unhooked(self, obj: Any) -> Iterator[None]:
        modules = [one for one in obj.modules() if one in self] if isinstance(obj, nn.Module) else []
        for module in modules:
            for handle in self._handles[id(module)][1]:
                handle.remove()
        try:
            yield
        finally:
            for module in modules:
                self._register(module)


class _Hook:
    """A hook that is copied and pickled as a function that does nothing, for modules with a ``__getstate__`` of their own."""

    def __init__(self, body: Hook) -> None:
        self._body = body

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        self._body(module, *rest)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")
