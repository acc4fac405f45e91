"""``sentinel replay``: run the step of a bundle again, find the op that did it, and prove the cause.

Owns the command. The replay runs in a process of its own (``postmortem/replayer.py``), since this one never imports torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from sentinel.bundle.replayed import PRECISIONS, Precision, ReplayRequest, write_record
from sentinel.cli.options import Output
from sentinel.cli.output import ExitCode, OutputFormat, fail, put, say
from sentinel.postmortem.replay_page import describe_replay
from sentinel.postmortem.replayer import ReplayFailed, keep
from sentinel.postmortem.replayer import replay as run_replay


def replay(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle's directory, or its manifest.json.")],
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="R", help="Whose step. Default: the rank that was nonfinite first.")
    ] = None,
    precision: Annotated[
        str, typer.Option("--precision", metavar="P,…", help="Of same, fp32, bf16, fp16.")
    ] = "same,fp32,bf16",
    samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="Find the samples of the batch that do it.")
    ] = True,
    anomaly: Annotated[bool, typer.Option("--anomaly", help="Add torch's own anomaly detection (slow).")] = False,
    entry: Annotated[
        str | None, typer.Option("--entry", metavar="MODULE:FUNCTION", help="Call this with the batch, not the script.")
    ] = None,
    script: Annotated[
        str | None, typer.Option("--script", metavar="FILE", help="Another path of the script than the recorded one.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Of one run of the script.")] = 300.0,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Replay the step of a bundle on this machine: first bad op, precisions, samples, cause. Exits 1 if it could not be run."""
    request = ReplayRequest(
        bundle=str(bundle.absolute()),
        rank=rank,
        precisions=_precisions(precision),
        samples=samples,
        anomaly=anomaly,
        entry=_entry(entry),
        script=script,
        timeout=timeout,
    )
    progress = Progress()
    try:
        record = run_replay(request, progress)
    except ReplayFailed as error:
        progress.end()
        fail(str(error), error.hint)
    progress.end()
    try:
        write_record(keep(bundle), record)
    except OSError as error:
        say(f"the record could not be kept beside the bundle: {error.strerror}")
    put(record.model_dump_json(indent=1) if output is OutputFormat.JSON else describe_replay(record))
    if record.verdict.startswith("not_replayed"):
        raise typer.Exit(int(ExitCode.FAILURE))


class Progress:
    """One line on a terminal that says what is being tried; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._shown = 0
        self._on = sys.stderr.isatty()

    def __call__(self, words: str) -> None:
        """Show what is being tried now."""
        if self._on:
            line = f"replaying: {words} …"[:76]
            print(f"\r{line.ljust(self._shown)}", end="", file=sys.stderr, flush=True)
            self._shown = len(line)

    def end(self) -> None:
        """Take the line away."""
        if self._on and self._shown:
            print(f"\r{' ' * self._shown}\r", end="", file=sys.stderr, flush=True)


def _precisions(text: str) -> tuple[Precision, ...]:
    wanted = [one.strip() for one in text.split(",") if one.strip()]
    strange = sorted(set(wanted) - set(PRECISIONS))
    if strange or not wanted:
        fail(f"no precision {strange[0] if strange else ''!r}", f"one of {', '.join(PRECISIONS)}", ExitCode.USAGE)
    return cast("tuple[Precision, ...]", tuple(wanted))


def _entry(entry: str | None) -> str | None:
    if entry is not None and not all(entry.partition(":")):
        fail(f"{entry!r} is not MODULE:FUNCTION", "for example: --entry train:replay_step", ExitCode.USAGE)
    return entry
