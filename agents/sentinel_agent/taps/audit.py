"""Audit of a forward: intermediates that overflow their half precision and are absorbed before they reach the loss.

Owns a dispatch mode around the outermost root forward of rounds 0, 1, 2, 4, 8, …, on host tensors, where the settings ask for
it (torch does not compile under such a mode), and never once anything was compiled. Only arithmetic that leaves float16 or
bfloat16 counts: infinities that are written as constants (attention masks), or that come of adding to one, are meant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sentinel.wire.messages import Check
from sentinel_agent.check import check_one, local_part

OPS = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "mul",
        "pow",
        "square",
        "sum",
        "_to_copy",
        "cumsum",
        "linear",
        "dot",
        "mv",
    }
)
HALF = (torch.float16, torch.bfloat16)
_TORCH = torch.__path__[0]
_OWN = __package__.partition(".")[0] if __package__ else "sentinel_agent"


def due(round_: int) -> bool:
    """Rounds whose forwards are audited: 0, 1, 2, 4, 8, …, so that a run of any length pays for a handful."""
    return round_ & (round_ - 1) == 0


def is_compiled_process() -> bool:
    """True once anything was compiled here: a call under a dispatch mode would leave compiled code eager until it is reset."""
    frame = sys.modules.get("torch._dynamo.eval_frame")
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return frame is not None and bool(counters and counters.get("frames"))


class Overflows(TorchDispatchMode):
    """Calls ``found(check, note)`` for the first half-precision result that has infinities though its inputs have none."""

    def __init__(self, found: Callable[[Check, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found
        self._done = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op as it is; look at the result if it is one that can overflow."""
        result = func(*args, **(kwargs or {}))
        if not self._done and type(result) is torch.Tensor and result.dtype in HALF and _name(func) in OPS:
            self._look(func, result, (*args, *(kwargs or {}).values()))
        return result

    def _look(self, func: Any, result: torch.Tensor, inputs: tuple[Any, ...]) -> None:
        if result.device.type != "cpu" or result.numel() == 0:
            return
        check = check_one(result.detach())
        if check.inf and all(not check_one(part).nonfinite for one in inputs if (part := local_part(one)) is not None):
            self._done = True
            dtype = str(result.dtype).removeprefix("torch.")
            self._found(check, f"{_name(func)} overflowed {dtype} at {_line(sys._getframe(1))}")


class Audit:
    """Begins and ends the audit around outermost forwards. ``found(check, note)`` hears of an overflow."""

    def __init__(self, found: Callable[[Check, str], None], *, allowed: bool) -> None:
        self._found = found
        self._allowed = allowed
        self._mode: Overflows | None = None

    def forward_begins(self, round_: int) -> None:
        """Enter the mode, if this round is due and nothing forbids it."""
        if self._allowed and self._mode is None and due(round_) and not is_compiled_process():
            self._mode = Overflows(self._found)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def forward_ended(self) -> None:
        """Leave the mode; called however the forward ended."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _name(func: Any) -> str:
    packet = getattr(func, "overloadpacket", None)
    return str(getattr(packet, "__name__", "")).rstrip("_") or str(func)


def _line(frame: FrameType | None) -> str:
    """File and line of the innermost frame that is neither torch's nor ours."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, "<")) and f"/{_OWN}/" not in file:
            return f"{file.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
