"""Whom a command that acts must talk to: the coordinator that is running for a run directory, or at an address.

Owns that choice. Whoever may read the run directory's ``join.json`` (a secret, 0600) may act; an address needs its token.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sentinel.cli.output import ExitCode, fail
from sentinel.cli.source import Pages, newest_run
from sentinel.wire.link import Join, acting_token
from sentinel.wire.names import JOIN_FILE, LOCK_FILE


def coordinator(run_dir: Path | None, http: str | None, token: str | None) -> Pages:
    """The coordinator to ask. Leaves with exit code 4 if none is running for the run directory."""
    if run_dir is None and http is not None:
        return Pages(http.rstrip("/"), token)
    where = run_dir or newest_run()
    running = running_in(where)
    if running is None:
        fail(
            f"no coordinator is running in {where}",
            "the run is over, or it reports elsewhere: --http URL",
            ExitCode.UNREACHABLE,
        )
    return running


def running_in(run_dir: Path) -> Pages | None:
    """The coordinator that works in ``run_dir`` now, None if there is none. Leaves if it cannot be asked."""
    if not is_running(run_dir):
        return None
    try:
        join = Join.read(run_dir / JOIN_FILE)
    except (OSError, ValueError) as error:
        fail(
            f"cannot read {run_dir / JOIN_FILE} ({error})",
            "it is readable for who started the run alone",
            ExitCode.REFUSED,
        )
    if join.http is None:
        fail(
            f"the coordinator in {run_dir} serves no pages",
            "start the run without --sentinel-http-bind off",
            ExitCode.REFUSED,
        )
    return Pages(join.http, acting_token(join.command_key))


def is_running(run_dir: Path) -> bool:
    """Does a coordinator hold the lock of ``run_dir``?"""
    try:
        fd = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        fail(f"cannot look at {run_dir / LOCK_FILE} ({error.strerror})", "act as who started the run", ExitCode.REFUSED)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
