"""Flags that several commands share, with the words of their help.

Owns their spelling and environment defaults; what they choose is read by ``source.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sentinel.cli.output import OutputFormat
from sentinel.wire.names import ENV_HTTP

Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="table for people, json for programs.")]
RunDir = Annotated[
    Path | None,
    typer.Option("--run-dir", metavar="DIR", help="Run directory. Default: the newest below ./sentinel-runs."),
]
Http = Annotated[
    str | None,
    typer.Option("--http", metavar="URL", envvar=ENV_HTTP, help="Ask a running coordinator's pages instead."),
]
Token = Annotated[
    str | None,
    typer.Option("--token", metavar="TOKEN", envvar="SENTINEL_HTTP_TOKEN", help="Bearer token of those pages."),
]
RunId = Annotated[str | None, typer.Option("--run-id", metavar="ID", help="Only this run's incidents.")]
