"""What a command leaves behind: exit codes, output formats, and errors as one line with a hint.

Owns the outside form of every command. Results go to stdout, everything said about them to stderr.
"""

from __future__ import annotations

import os
import sys
from enum import IntEnum, StrEnum
from typing import NoReturn

import typer

from sentinel.postmortem.text import printable


class ExitCode(IntEnum):
    """Exit codes of every command but ``run``, which keeps torchrun's own."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    INCIDENTS_FOUND = 3
    UNREACHABLE = 4
    REFUSED = 5
    PARTIAL = 6


EXIT_CODE_WORDS: dict[ExitCode, str] = {
    ExitCode.OK: "done; for incidents ls: none found",
    ExitCode.FAILURE: "something could not be read or done, or a check failed",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.INCIDENTS_FOUND: "incidents ls found at least one warning or critical incident",
    ExitCode.UNREACHABLE: "no coordinator answers at the address",
    ExitCode.REFUSED: "the coordinator wants a token, or the bundle is not one that is safe to read",
    ExitCode.PARTIAL: "the bundle is partial: a rank's part or the manifest is missing",
}


class OutputFormat(StrEnum):
    """``-o``: for people, or for programs."""

    TABLE = "table"
    JSON = "json"


def fail(message: str, hint: str = "", code: ExitCode = ExitCode.FAILURE) -> NoReturn:
    """Say on one line what is wrong, on another what to do, and leave with ``code``."""
    say_error(message, hint)
    raise typer.Exit(int(code))


def say_error(message: str, hint: str = "") -> None:
    """``sentinel: error: …`` and ``hint: …`` on stderr."""
    print(f"sentinel: error: {printable(message, 500)}", file=sys.stderr)
    if hint:
        print(f"hint: {printable(hint, 500)}", file=sys.stderr)


def say(message: str) -> None:
    """A message beside the result, on stderr."""
    print(message, file=sys.stderr)


def put(result: str) -> None:
    """The result, on stdout. A reader that has seen enough (``| head``) ends the command without complaint."""
    try:
        print(result, flush=True)
    except BrokenPipeError:
        # Give the interpreter somewhere to flush to at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(int(ExitCode.OK)) from None
