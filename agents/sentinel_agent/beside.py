"""One computation beside another: on a thread of its own while its caller waits for a disk, or at once where no thread can be had.

Owns that thread. A pool of the library's starts none once the interpreter shuts down, which is when a last part may be written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def beside(compute: Callable[[], T]) -> Future[T]:
    """``compute()``, begun now; the future's ``result()`` waits for it and raises what it raised.

    An interpreter that is shutting down, or a host at its limit of threads, starts none: then it is computed here.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(compute())
        except BaseException as failure:  # noqa: BLE001 - the caller gets it from result()
            future.set_exception(failure)

    try:
        threading.Thread(target=run, name="sentinel-beside", daemon=True).start()
    except RuntimeError:
        run()
    return future
