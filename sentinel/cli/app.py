"""The command tree of every command but ``run``, and the one place where a usage error becomes a line and an exit code.

Owns names and order of the commands. ``main.py`` calls ``app``; ``sentinel run`` never comes here, as torchrun's own parser
reads its command line.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import typer
from typer.core import TyperGroup

from sentinel.cli.coordinator import coordinator
from sentinel.cli.dashboards import dashboards_app
from sentinel.cli.difference import diff
from sentinel.cli.doctor import doctor
from sentinel.cli.dump import dump_app
from sentinel.cli.incidents import incidents_app
from sentinel.cli.lint import lint
from sentinel.cli.output import ExitCode, say_error
from sentinel.cli.replay import replay
from sentinel.cli.report import report
from sentinel.cli.rules import rules_app
from sentinel.cli.status import status
from sentinel.cli.top import top
from sentinel.cli.version import version

# typer re-exports only this leaf of its usage errors; its parent is what every one of them derives from.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])

_EPILOG = (
    "Exit codes: 0 ok, 1 failure, 2 usage, 3 incidents found, 4 coordinator unreachable, 5 refused, 6 partial bundle."
)


class OneLineErrors(TyperGroup):
    """A group whose usage errors are one line with a hint."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command line and leave with its exit code, as click does."""
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except _UsageError as error:
            say_error(error.format_message(), _usage_hint(error))
            code = ExitCode.USAGE
        except typer.Abort:
            code = 130
        sys.exit(int(code or 0))


def _usage_hint(error: typer.BadParameter) -> str:
    return f"{error.ctx.command_path} --help" if error.ctx else "sentinel --help"


app = typer.Typer(
    name="sentinel",
    cls=OneLineErrors,
    help="Tells you which rank, step and tensor made a distributed training job go nonfinite.\n\n"
    "Start a job with: sentinel run [torchrun flags] script.py   (sentinel run --help)",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(incidents_app, name="incidents")
dump_app.command("diff")(diff)
app.add_typer(dump_app, name="dump")
app.add_typer(rules_app, name="rules")
app.add_typer(dashboards_app, name="dashboards")
app.command()(replay)
app.command()(status)
app.command()(top)
app.command()(coordinator)
app.command()(doctor)
app.command()(report)
app.command()(lint)
app.command()(version)
