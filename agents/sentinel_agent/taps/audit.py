"""Audit of a forward: intermediates that overflow their half precision and are absorbed before they reach the loss.

Owns a dispatch mode around the outermost root forward of rounds 1, 2, 4, 8, …, where the settings ask for it and as long as a
budget lasts. Never where anything is compiled (torch does not compile under such a mode) or another mode runs; round 0, in which a
compiler would begin, is left out. Not by default: what an operator calls inside is not autocast under a dispatch mode.
Only arithmetic that leaves float16 or bfloat16 counts: infinities that are written as constants, that come of adding to one, or
that are masks (all negative, and nothing is trained through them) are meant.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sentinel.wire.messages import Check
from sentinel_agent.check import local_part
from sentinel_agent.errors import Health

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


BUDGET_SECONDS: Final = 10.0
BUDGET_SHARE: Final = 0.01
"""Audited forwards may take this long in all, or this share of the time since the first forward, whichever is more."""


def due(round_: int) -> bool:
    """Rounds whose forwards are audited: 1, 2, 4, 8, …, so that a run of any length pays for a handful."""
    return round_ > 0 and round_ & (round_ - 1) == 0


def is_compiled_process() -> bool:
    """True once anything was compiled here, or is to be: a call under a dispatch mode would leave it eager until it is reset."""
    frame = sys.modules.get("torch._dynamo.eval_frame")
    if frame is None:
        return False
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    asked = any(backend is not None for backend in getattr(frame, "cached_backends", {}).values())
    return asked or bool(counters and counters.get("frames"))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A look at a device's tensor whose answer is fetched at the forward's end, with all others: how many overflowed."""

    overflowed: Tensor
    numel: int
    what: str
    module: weakref.ref[nn.Module] | None


class Overflows(TorchDispatchMode):
    """Remembers the first half-precision result that has infinities though its inputs have none: ``found``.

    ``module_name(module)`` is what a module is called. A fault of ours stays within ``health``.
    """

    def __init__(self, health: Health, module_name: Callable[[nn.Module], str | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: tuple[Check, str] | None = None
        self._waiting: list[_Waiting] = []
        self._module_name = module_name
        self._guarded_look = health.guarded("audit", self._look)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op as it is; look at the result if it is one that can overflow."""
        result = func(*args, **(kwargs or {}))
        if self.found is None and type(result) is Tensor and result.dtype in HALF and _name(func) in OPS:
            self._guarded_look(func, result, (*args, *(kwargs or {}).values()))
        return result

    def settle(self) -> None:
        """The forward is over: ask the device, once, what came of the looks at its tensors."""
        if not self._waiting or self.found is not None:
            return
        device = self._waiting[0].overflowed.device
        counts = torch.stack([one.overflowed.to(device) for one in self._waiting]).tolist()
        for one, count in zip(self._waiting, counts, strict=True):
            if count:
                self.found = Check(one.numel, 0, count, 0.0), self._named(one.what, one.module)
                return

    def _look(self, func: Any, result: Tensor, inputs: tuple[Any, ...]) -> None:
        if result.numel() == 0 or result.layout is not torch.strided or result.is_nested:
            return
        parts = [part for one in inputs if (part := local_part(one)) is not None]
        trained = any(isinstance(one, Tensor) and one.requires_grad for one in inputs)
        looked = result.detach()
        if _is_on_host(result):
            count = _count(looked, trained)
            if count and all(_is_finite(part) for part in parts):
                self.found = Check(result.numel(), 0, count, 0.0), self._named(*_described(func, result))
        elif _takes_work(result):
            overflowed = (torch.isinf(looked) if trained else looked == math.inf).sum()
            for part in parts:
                overflowed = overflowed * torch.isfinite(part).all().to(result.device)
            self._waiting.append(_Waiting(overflowed, result.numel(), *_described(func, result)))

    def _named(self, what: str, module: weakref.ref[nn.Module] | None) -> str:
        alive = module() if module is not None else None
        name = self._module_name(alive) if alive is not None else None
        return what + (f" in {name}" if name else "")


def _described(func: Any, result: Tensor) -> tuple[str, weakref.ref[nn.Module] | None]:
    """What happened and where; the module, whose name is searched for only if it is told."""
    line, module = _place(sys._getframe(1))
    what = f"{_name(func)} overflowed {str(result.dtype).removeprefix('torch.')} at {line}"
    return what, weakref.ref(module) if module is not None else None


def _is_on_host(tensor: Tensor) -> bool:
    """Can it be looked at without waiting for a device?"""
    return tensor.device.type == "cpu"


def _takes_work(tensor: Tensor) -> bool:
    """Can its device be given work of ours? Not while its stream is captured into a graph."""
    return tensor.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _count(result: Tensor, trained: bool) -> int:
    """Infinities in a result on the host; where nothing is trained through it, only positive ones."""
    low, high = torch.aminmax(result)
    if math.isfinite(low.item()) and math.isfinite(high.item()):
        return 0
    return int((torch.isinf(result) if trained else result == math.inf).sum())


def _is_finite(part: Tensor) -> bool:
    low, high = torch.aminmax(part if part.element_size() > 1 else part.float())  # there is none for 8-bit floats
    return math.isfinite(low.item()) and math.isfinite(high.item())


class Audit:
    """Begins and ends the audit around outermost forwards. ``found(check, note)`` hears of an overflow."""

    def __init__(
        self,
        found: Callable[[Check, str], None],
        health: Health,
        module_name: Callable[[nn.Module], str | None],
        *,
        allowed: bool,
    ) -> None:
        self._found = found
        self._health = health
        self._module_name = module_name
        self._allowed = allowed
        self._mode: Overflows | None = None
        self._thread = 0  # whose stack of modes it is on
        self._began = 0.0
        self._first = 0.0
        self._spent = 0.0
        self._clean = -1  # the last audited round in which nothing was found
        self._round = -1

    def forward_begins(self, round_: int) -> None:
        """Enter the mode, if this round is due and nothing forbids it."""
        if not self._allowed or self._mode is not None:
            return
        now = time.perf_counter()
        self._first = self._first or now
        if not due(round_) or self._spent > max(BUDGET_SECONDS, BUDGET_SHARE * (now - self._first)):
            return
        self._allowed = not is_compiled_process()  # for good: what is compiled may be compiled anew at any time
        if not self._allowed or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
            return
        self._began, self._round, self._thread = now, round_, threading.get_ident()
        self._mode = Overflows(self._health, self._module_name)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def forward_ended(self) -> None:
        """Leave the mode; called however the forward ended."""
        if self._mode is None or self._thread != threading.get_ident():
            return  # another thread's forward has ended
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._health.guarded("audit", self._tell)(mode)
        self._spent += time.perf_counter() - self._began

    def _tell(self, mode: Overflows) -> None:
        mode.settle()
        if mode.found is None:
            self._clean = self._round
            return
        check, note = mode.found
        before = f"; not in round {self._clean}, the last one looked at" if 0 <= self._clean < self._round else ""
        self._found(check, note + before)


def _name(func: Any) -> str:
    packet = getattr(func, "overloadpacket", None)
    return str(getattr(packet, "__name__", "")).rstrip("_") or str(func)


def _place(frame: FrameType | None) -> tuple[str, nn.Module | None]:
    """File and line of the innermost frame that is neither torch's nor ours, and the innermost module whose forward runs."""
    line, module = "", None
    while frame is not None and (not line or module is None):
        file = frame.f_code.co_filename
        if not line and not file.startswith((_TORCH, "<")) and f"/{_OWN}/" not in file:
            line = f"{file.rpartition('/')[2]}:{frame.f_lineno}"
        if module is None and frame.f_code.co_name == "forward":
            owner = frame.f_locals.get("self")
            module = owner if isinstance(owner, nn.Module) else None
        frame = frame.f_back
    return line or "an unknown line", module
