"""One launch, told in order: begin to watch, let torchrun run the job, say what was found, leave with torchrun's exit code.

Owns the order and the exit code. What watching takes is in ``watch.py``; torchrun itself is untouched.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import run

from sentinel.launch import console
from sentinel.launch.halted import HALTED, final, was_halted
from sentinel.launch.options import LaunchOptions, UsageError
from sentinel.launch.signals import hold
from sentinel.launch.watch import begin, finish

T = TypeVar("T")

FAILED = 1  # what Python leaves with after an exception, and so what torchrun leaves with


def launch(options: LaunchOptions) -> int:
    """Run the job; returns torchrun's exit code, or 93 if the guard halted it.

    Errors that torchrun would show as a traceback pass through.
    """
    watch = _beside(lambda: begin(options), "training goes on as plain torchrun, unwatched") if options.agent else None
    exit_code = FAILED
    try:
        if watch is None:
            exit_code = _train(options.torchrun)
        else:
            with final(watch.run_dir):
                exit_code = _train(options.torchrun)
            exit_code = HALTED if exit_code == FAILED and was_halted(watch.run_dir) else exit_code
    finally:
        if watch is not None:
            hold(options.torchrun.signals_to_handle, exit_code)
            _beside(lambda: finish(watch, exit_code), "the exit code is the training's own")
    return exit_code


def _beside(act: Callable[[], T], consequence: str) -> T | None:
    """Result of ``act``, or None after a mistake of ours in it, which is said in one line and costs the job nothing."""
    try:
        return act()
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - what is beside the job must neither keep it from running nor change its end
        console.warn(f"a fault of Sentinel's own: {type(error).__name__}: {str(error)[:200]}", consequence)
        return None


def _train(torchrun: argparse.Namespace) -> int:
    """torchrun, recorded as its own ``main`` is.

    A failed worker or a signal is shown here, as the interpreter would show it at exit, so that the summary comes last.
    """
    try:
        record(run)(torchrun)
    except (ChildFailedError, SignalException) as error:
        hold(torchrun.signals_to_handle, FAILED)
        shown = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)  # without this frame
        sys.excepthook(type(shown), shown, shown.__traceback__)
        return FAILED
    return 0
