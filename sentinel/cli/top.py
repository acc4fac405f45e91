"""``sentinel top``: the runs of a coordinator, live in a terminal.

Owns the command and its loop. What a frame looks like is ``top_frame.py``; ``sentinel status`` is the same once, for scripts.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.parse
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from sentinel.cli.options import Http, RunDir, Token
from sentinel.cli.output import ExitCode, fail
from sentinel.cli.source import Pages, newest_run
from sentinel.wire.names import JOIN_FILE, RUN_FILE

if TYPE_CHECKING:
    from sentinel.cli.top_frame import RunFrame
    from sentinel.coordinator.snapshot import RunStatus

MAX_RUNS = 8
ROUNDS = 48
ROWS = 16
MIN_SECONDS = 0.2

Model = TypeVar("Model", bound=BaseModel)


def top(
    run_dir: RunDir = None,
    http: Http = None,
    token: Token = None,
    interval: Annotated[
        float, typer.Option("--interval", "-n", metavar="SECONDS", help="Time between two frames.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one frame and leave, as without a terminal.")] = False,
) -> None:
    """Watch the runs of a coordinator live: curves, ranks by rounds, incidents. Ctrl-C leaves."""
    from rich.console import Console
    from rich.live import Live

    from sentinel.cli.top_frame import frame

    pages = Pages(_address(run_dir, http), token)
    console = Console(highlight=False, soft_wrap=False)
    first = frame(pages.url, _runs(pages), datetime.now(UTC))
    if once or not sys.stdout.isatty():
        console.print(first)
        return
    try:
        with Live(first, console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(max(interval, MIN_SECONDS))
                live.update(frame(pages.url, _runs(pages), datetime.now(UTC)), refresh=True)
    except KeyboardInterrupt:
        raise typer.Exit(int(ExitCode.OK)) from None


def _address(run_dir: Path | None, http: str | None) -> str:
    """Where the pages are: as given, or as the run directory's own files say."""
    if run_dir is None and http is not None:
        return http.rstrip("/")
    directory = run_dir or newest_run()
    named = next(filter(None, (_named_in(directory / name) for name in (RUN_FILE, JOIN_FILE))), None)
    if named is None:
        fail(
            f"no coordinator with pages is named in {directory}",
            "name one: --http http://HOST:PORT",
            ExitCode.UNREACHABLE,
        )
    return named


def _named_in(path: Path) -> str | None:
    try:
        named = json.loads(path.read_text(encoding="utf-8"))["http"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return named if isinstance(named, str) else None


def _runs(pages: Pages) -> list[RunFrame]:
    """The runs that are going on, else the ended ones, newest last."""
    from sentinel.coordinator.pages import Status

    runs = _ask(pages, Status, "/api/v1/status?ranks=false").runs
    going_on = [run for run in runs if not run.ended] or list(runs)
    return [_run(pages, run) for run in going_on[-MAX_RUNS:]]


def _run(pages: Pages, status: RunStatus) -> RunFrame:
    from sentinel.cli.top_frame import RunFrame
    from sentinel.coordinator.pages import RankHealth
    from sentinel.coordinator.rounds_view import RoundsAnswer

    query = urllib.parse.urlencode({"run_id": status.run_id})
    return RunFrame(
        status,
        _ask(pages, RoundsAnswer, f"/api/v1/rounds?{query}&last={ROUNDS}&blocks={ROWS}"),
        _ask(pages, RankHealth, f"/api/v1/ranks?{query}").ranks,
        pages.incidents(status.run_id).incidents,
    )


def _ask(pages: Pages, model: type[Model], path: str) -> Model:
    try:
        return model.model_validate_json(pages.get(path))
    except ValidationError:
        fail(f"{pages.url} does not answer as a coordinator of this version", "compare both ends: sentinel version")
