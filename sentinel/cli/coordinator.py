"""``sentinel coordinator``: a coordinator on its own, for many runs, until SIGINT or SIGTERM.

Owns flags and life of the command. What they mean is ``coordinator/config.py``; ``sentinel run`` embeds its own.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import SecretStr, ValidationError

from sentinel.cli.output import ExitCode, fail, say
from sentinel.wire.names import JOIN_FILE

STOP_SECONDS = 10.0


def coordinator(
    run_dir: Annotated[
        Path, typer.Option("--run-dir", metavar="DIR", help="Holds the database, the keys and join.json.")
    ] = Path("sentinel-coordinator"),
    bind: Annotated[
        str | None, typer.Option("--bind", metavar="URL", help="Where relays connect. Default: tcp://127.0.0.1:0")
    ] = None,
    http_bind: Annotated[
        str | None, typer.Option("--http-bind", metavar="HOST:PORT", help="Pages, /metrics. Default: 127.0.0.1:0")
    ] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="Serve no pages and no metrics.")] = False,
    allow_remote_http: Annotated[
        bool, typer.Option("--allow-remote-http", help="Permit --http-bind beyond this host; needs a token.")
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="Bearer token that every page asks for.")
    ] = None,
) -> None:
    """Run a coordinator that outlives single runs. Launchers join it with: sentinel run --sentinel-join join.json …"""
    given: dict[str, Any] = {"bind": bind, "http_bind": http_bind, "http_token": _token(token_file)}
    given = {name: value for name, value in given.items() if value is not None}
    if no_http:
        given["http_enabled"] = False
    if allow_remote_http:
        given["http_allow_remote"] = True
    _serve(run_dir.absolute(), given)


def _serve(run_dir: Path, given: dict[str, Any]) -> None:
    from sentinel.coordinator.app import Coordinator
    from sentinel.coordinator.config import CoordinatorSettings

    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    try:
        settings = CoordinatorSettings(run_dir=run_dir, **given)
    except ValidationError as error:
        fail(_first(error), "sentinel coordinator --help", ExitCode.USAGE)
    try:
        running = Coordinator(settings).start()
    except (OSError, RuntimeError, ValueError) as error:
        fail(f"the coordinator cannot start: {error}", "is the port free, and the directory writable?")
    say(f"sentinel: coordinator listening at {running.join.endpoint}")
    if running.http_url:
        say(f"sentinel: pages and metrics at {running.http_url}")
    say(f"sentinel: launchers join with: sentinel run --sentinel-join {run_dir / JOIN_FILE} script.py")
    stopping.wait()
    running.stop(STOP_SECONDS)
    say("sentinel: coordinator stopped")


def _token(path: Path | None) -> SecretStr | None:
    if path is None:
        return None
    try:
        return SecretStr(path.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read the token file {path} ({error})", "a file with one line", ExitCode.USAGE)


def _first(error: ValidationError) -> str:
    seen = error.errors()[0]
    where = ".".join(str(part) for part in seen["loc"])
    message = seen["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
