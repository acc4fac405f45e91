"""``sentinel dashboards``: dashboards for a Grafana.

Owns the command. The dashboards themselves are ``coordinator/exports``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sentinel.cli.output import fail, put

dashboards_app = typer.Typer(no_args_is_help=True, help="Dashboards for Grafana.", rich_markup_mode=None)


@dashboards_app.callback()
def dashboards_group() -> None:
    """Dashboards for Grafana."""


@dashboards_app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the JSON files are written; made if absent.")],
) -> None:
    """Write the dashboards (fleet, run, incident) as JSON files that Grafana imports or provisions."""
    from sentinel.coordinator.exports.dashboards import dashboards

    written = sorted(dashboards().items())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in written:
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"cannot write to {folder} ({error.strerror})", "name a folder that you may write to")
    put("\n".join(str(folder / name) for name, _ in written))
