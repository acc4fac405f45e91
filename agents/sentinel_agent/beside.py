"""One computation beside another: on a thread of its own while its caller waits for a disk, or at once where no thread can be had.

Owns that thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def beside(compute: Callable[[], T]) -> Callable[[], T]:
    """``compute()``, begun now; calling what is returned waits for it, and returns or raises what it did.

    An interpreter that is shutting down, or a host at its limit of threads, starts none: then it is computed when it is called for.
    """
    pool = ThreadPoolExecutor(1, "sentinel-beside")
    try:
        return pool.submit(compute).result
    except RuntimeError:
        return compute
    finally:
        pool.shutdown(wait=False)
