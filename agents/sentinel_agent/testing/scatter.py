"""A gloo reduce-scatter whose result can be changed.

Owns one kernel below every tap. gloo's own work copies the result into the output at each ``wait``, so that a change made after
the first would be undone by the second; here the work that is handed out has ended already.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sentinel_agent.taps.wire import REDUCE_OPS

OP = "_reduce_scatter_base_"

_library: torch.library.Library | None = None


class _Here(threading.local):
    change: Callable[[], None] | None = None


_here = _Here()


def install() -> None:
    """Replace the CPU kernel, once per process. Without a change to make it is gloo's reduce-scatter as it was."""
    global _library
    if _library is None:
        _library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that a kernel is overridden: it is meant to be
            _library.impl(OP, _kernel, "CPU")  # type: ignore[no-untyped-call]


def then(change: Callable[[], None]) -> None:
    """Call ``change`` when the next reduce-scatter of this thread has its result, before anybody sees it."""
    _here.change = change


def _kernel(out: Any, into: Any, group: Any, op: Any, *_rest: Any) -> Any:
    change, _here.change = _here.change, None
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(getattr(dist.ReduceOp.RedOpType, REDUCE_OPS[op.op()]))
    backend: Any = dist.ProcessGroup.unbox(group)._get_backend(torch.device("cpu"))
    work = backend._reduce_scatter_base(out, into, options)
    if change is None:
        return out, work.boxed()
    work.wait()
    change()
    return out, _ended(out).boxed()


def _ended(out: torch.Tensor) -> Any:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([out])
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
