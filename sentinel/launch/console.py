"""Sentinel's lines on the user's terminal: stderr, prefixed, one thought a line.

Owns prefix, colour (a terminal without NO_COLOR only) and the form of errors. What is said comes from elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sentinel.launch.options import wants_colour

PREFIX = "sentinel:"


def say(text: str) -> None:
    """One line about the run."""
    print(f"{PREFIX} {text}", file=sys.stderr, flush=True)


def warn(problem: str, consequence: str) -> None:
    """Something of ours does not work; training goes on."""
    print(f"{PREFIX} warning: {problem}; {consequence}", file=sys.stderr, flush=True)


def complain(problem: str, hint: str) -> None:
    """The command cannot be followed: an error line and what to do about it."""
    print(f"{PREFIX} error: {problem}\nhint: {hint}", file=sys.stderr, flush=True)


def say_block(lines: Sequence[str], alarm: bool) -> None:
    """Several lines under one prefix; the first stands out on a terminal if it is an alarm."""
    if not lines:
        return
    head, *rest = lines
    if alarm and wants_colour():
        _say_bold(head)
    else:
        say(head)
    for line in rest:
        print(line, file=sys.stderr)
    sys.stderr.flush()


def _say_bold(line: str) -> None:
    from rich.console import Console
    from rich.text import Text

    text = Text.assemble((PREFIX, "bold red"), " ", (line, "bold"))
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)
