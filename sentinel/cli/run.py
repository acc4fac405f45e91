"""``sentinel run``: torchrun's command line with Sentinel watching. No logic: options, then the launch.

Owns the form of the errors that end a launch before it begins.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = 2
FAILURE = 1


def run(argv: Sequence[str]) -> int:
    """Launch a job; returns torchrun's own exit code, or 2 if the command line cannot be followed."""
    try:
        from sentinel.launch.launcher import launch
        from sentinel.launch.options import UsageError, parse
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        return _fail("sentinel run needs PyTorch, which is not installed here", "pip install torch", FAILURE)
    try:
        options = parse(argv)
    except UsageError as error:
        return _fail(str(error), error.hint, USAGE)
    return launch(options)


def _fail(problem: str, hint: str, code: int) -> int:
    print(f"sentinel: error: {problem}\nhint: {hint}", file=sys.stderr)
    return code
