"""Runs the user's script in another precision than it was written for, without a change to it.

Owns what "in float32" means: autocast off, casts to half precisions become casts to float32, gradient scaling off. In bfloat16 or
float16, a script that uses a half precision uses that one instead; one that uses none runs its forward under autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from sentinel.bundle.replayed import Precision
from sentinel_agent.patching import wrap

HALVES: Final = frozenset({torch.float16, torch.bfloat16})
TARGETS: Final[dict[Precision, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Override:
    """A precision other than the script's. ``target`` is None for ``same``, which changes nothing."""

    def __init__(self, precision: Precision) -> None:
        self.target = TARGETS.get(precision)
        self.low_precision = False  # the script asked for a half precision somewhere
        self._mode: TorchFunctionMode | None = None

    @property
    def scales_gradients(self) -> bool:
        """A GradScaler is left on only where the gradients are float16's."""
        return self.target is None or self.target is torch.float16

    def install(self) -> None:
        """Patch autocast and, for another precision, watch every cast of the script from now on."""
        wrap(torch.amp.autocast_mode.autocast, "__init__", self._autocast)
        if self.target is not None:
            self._mode = _Casts(self, self.target)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def around_forward(self) -> AbstractContextManager[Any]:
        """Autocast for a script that uses no half precision of its own."""
        if self.target in (None, torch.float32) or self.low_precision:
            return nullcontext()
        return torch.autocast("cpu", dtype=self.target)

    def widened(self, output: Any) -> Any:
        """The output of such a forward in float32, as the script expects it."""
        if self.target in (None, torch.float32) or self.low_precision:
            return output
        return tree_map(_to_float, output)

    def _autocast(self, original: Callable[..., None]) -> Callable[..., None]:
        target = self.target

        def init(
            context: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
        ) -> None:
            self.low_precision = self.low_precision or enabled
            if target is not None:
                enabled = enabled and target is not torch.float32
                dtype = target if enabled else dtype
            original(context, device_type, dtype, enabled, cache_enabled)

        return init


class _Casts(TorchFunctionMode):
    """Turns every cast to a half precision into one to ``target``."""

    def __init__(self, override: Override, target: torch.dtype) -> None:
        super().__init__()
        self._override = override
        self._target = target

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("half", "bfloat16") and args:
            self._override.low_precision = True
            return args[0].to(self._target)
        if any(type(value) is torch.dtype and value in HALVES for value in (*args, *kwargs.values())):
            self._override.low_precision = True
            args = tuple(self._replaced(value) for value in args)
            kwargs = {key: self._replaced(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _replaced(self, value: Any) -> Any:
        return self._target if type(value) is torch.dtype and value in HALVES else value


def _to_float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALVES else value
