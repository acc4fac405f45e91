"""The command line and environment of ``sentinel run``: torchrun's own parser plus a group of ``--sentinel-*`` flags.

Owns every reading (and the one writing) of the launcher's environment. What the options mean is decided in ``launcher.py``;
torchrun's flags are parsed by torchrun's parser and handed back to it untouched.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from sentinel.coordinator.config import split_host_port
from sentinel.wire.link import Join
from sentinel.wire.names import (
    ENV_AGENT,
    ENV_AGENT_OPTIONS,
    ENV_ENDPOINT,
    ENV_JOIN,
    ENV_RUN_DIR,
    ENV_RUN_ID,
    ENV_SERVER_KEY,
)

PREFIX = "sentinel_"
HTTP_OFF = "off"
MAX_RUN_ID = 256  # characters
DUMP_LEVELS = ("stats", "batch", "full")
GUARDS = ("observe", "skip", "halt")

_EPILOG = """\
examples:
  sentinel run --nproc-per-node 8 train.py --lr 0.1            one node, incidents below ./sentinel-runs
  sentinel run --standalone --nproc-per-node 2 -m my.train     a module, as with torchrun
  sentinel run --nnodes 4 --rdzv-backend c10d --rdzv-endpoint head:29400 --rdzv-id job7 train.py
                                                               the same line on every node
  sentinel run --sentinel-join join.json train.py              report to a coordinator that is already running

Every torchrun flag works as with torchrun, in both spellings, with its PET_* environment default.
Every --sentinel flag has an environment default: --sentinel-run-dir is SENTINEL_RUN_DIR, and so on.
Afterwards: sentinel incidents ls --run-dir DIR
"""


class UsageError(Exception):
    """The command line cannot be followed. ``hint`` says what to do instead."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What the user asked for. ``run_dir`` and ``run_id`` are None where the launcher is to choose them."""

    torchrun: argparse.Namespace  # torchrun's own namespace, nothing of ours in it
    argv: tuple[str, ...]
    run_dir: Path | None
    run_id: str | None
    join: Join | None
    bind: str | None
    http_bind: str | None  # None: no HTTP
    agent: bool
    quiet: bool
    dump_level: Literal["stats", "batch", "full"] | None
    redact: str | None  # module:function
    max_bundles: int | None
    window: int | None
    guard: str | None
    max_skips: tuple[int, int] | None  # in a row, in all
    targets_dir: Path | None  # where a Prometheus looks for file_sd targets
    python_path: str  # PYTHONPATH as the user has it
    agent_options: Mapping[str, object] = field(default_factory=dict)  # SENTINEL_AGENT_OPTIONS, which flags override

    @property
    def nodes(self) -> tuple[int, int]:
        """Smallest and largest number of nodes. Raises ValueError or RuntimeError as torchrun does for nonsense."""
        smallest, largest = parse_min_max_nnodes(self.torchrun.nnodes)
        return smallest, largest

    @property
    def world_size(self) -> int:
        """Number of ranks if the command line fixes it, else 0 (the ranks then say it themselves)."""
        try:
            smallest, largest = self.nodes
            return smallest * int(self.torchrun.nproc_per_node) if smallest == largest else 0
        except (ValueError, RuntimeError):
            return 0


class _RunParser(argparse.ArgumentParser):
    """A parser whose errors are one line with a hint, raised instead of printed."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, "sentinel run --help lists torchrun's flags and the --sentinel ones")


def build_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """torchrun's parser with the ``sentinel`` group added; ``environ`` gives the defaults of the group."""
    parser = _RunParser(
        prog="sentinel run",
        description="torchrun, with Sentinel watching: names the rank, step and tensor that first went non-finite.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[get_args_parser()],
        add_help=False,  # torchrun's parser brings its own -h
    )
    _add_sentinel_group(parser, environ)
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> LaunchOptions:
    """Options of one launch. Raises UsageError; ``--help`` leaves by SystemExit(0) as argparse does."""
    environ = os.environ if environ is None else environ
    namespace = build_parser(environ).parse_args(list(argv))
    given = {name: value for name, value in vars(namespace).items() if name.startswith(PREFIX)}
    torchrun = argparse.Namespace(**{name: value for name, value in vars(namespace).items() if name not in given})
    return LaunchOptions(
        torchrun=torchrun,
        argv=tuple(argv),
        run_dir=Path(given["sentinel_run_dir"]).absolute() if given["sentinel_run_dir"] else None,
        run_id=_named_run(given["sentinel_run_id"]) or _rendezvous_id(torchrun),
        join=_read_join(given["sentinel_join"], given["sentinel_endpoint"], given["sentinel_server_key"]),
        bind=given["sentinel_bind"],
        http_bind=_http_bind(given["sentinel_http_bind"]),
        agent=not given["sentinel_no_agent"],
        quiet=given["sentinel_quiet"],
        dump_level=given["sentinel_dump_level"],
        redact=given["sentinel_redact"],
        max_bundles=given["sentinel_max_bundles"],
        window=given["sentinel_window"],
        guard=given["sentinel_guard"],
        max_skips=given["sentinel_max_skips"],
        targets_dir=Path(given["sentinel_targets_dir"]).absolute() if given["sentinel_targets_dir"] else None,
        python_path=environ.get("PYTHONPATH", ""),
        agent_options=_agent_options(environ.get(ENV_AGENT_OPTIONS)),
    )


def _agent_options(text: str | None) -> dict[str, object]:
    try:
        options = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(
            f"{ENV_AGENT_OPTIONS} is not JSON: {error}", 'it is an object, such as {"timers": true}'
        ) from None
    if not isinstance(options, dict):
        raise UsageError(f"{ENV_AGENT_OPTIONS} is not a JSON object", 'such as {"timers": true}')
    return options


def export(changes: Mapping[str, str]) -> None:
    """Put ``changes`` into this process's environment, which torchrun copies to every worker it starts."""
    os.environ.update(changes)


def wants_colour(environ: Mapping[str, str] | None = None) -> bool:
    """True if stderr is a terminal whose user has not set NO_COLOR."""
    environ = os.environ if environ is None else environ
    return sys.stderr.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def _add_sentinel_group(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    group = parser.add_argument_group("sentinel")
    # A worker's environment names the run it belongs to; a launcher started inside one begins a run of its own.
    nested = environ.get(ENV_AGENT) == "1"
    own = {} if nested else environ

    def flag(name: str, default: str | None, help_: str, **more: object) -> None:
        spellings = (f"--sentinel-{name}", f"--sentinel_{name.replace('-', '_')}")
        group.add_argument(*dict.fromkeys(spellings), default=default, help=help_, **more)  # type: ignore[arg-type]

    flag("run-dir", own.get(ENV_RUN_DIR), "where everything is left (default: ./sentinel-runs/TIME-ID)", metavar="DIR")
    flag("run-id", own.get(ENV_RUN_ID), "name of the run (default: --rdzv-id, else generated)", metavar="ID")
    flag("join", environ.get(ENV_JOIN), "join file of a running coordinator; none is started then", metavar="FILE")
    flag("endpoint", environ.get(ENV_ENDPOINT), "reach that coordinator here instead (tcp://host:port)", metavar="URL")
    flag("server-key", environ.get(ENV_SERVER_KEY), "public key (Z85) instead of the join file's", metavar="KEY")
    flag("bind", environ.get("SENTINEL_BIND"), "interface of the coordinator, several nodes only", metavar="ADDRESS")
    http = environ.get("SENTINEL_HTTP_BIND", "127.0.0.1:0")
    flag(
        "http-bind", http, f"where pages and metrics are served, or '{HTTP_OFF}' (default: 127.0.0.1:0)", metavar="H:P"
    )
    targets = environ.get("SENTINEL_TARGETS_DIR")
    flag("targets-dir", targets, "tell a Prometheus here of the run: folder of its file_sd targets", metavar="DIR")
    level = environ.get("SENTINEL_DUMP_LEVEL")
    flag(
        "dump-level",
        level,
        "what a rank keeps of a faulty round: stats, batch or full",
        type=_dump_level,
        metavar="LEVEL",
    )
    redact = environ.get("SENTINEL_REDACT")
    redact_help = "function(name, value) that returns what of a batch may be written, None for nothing"
    flag("redact", redact, redact_help, type=_function, metavar="MODULE:FUNCTION")
    bundles = environ.get("SENTINEL_MAX_BUNDLES")
    flag("max-bundles", bundles, "most rounds that are dumped in one run", type=_positive, metavar="N")
    flag("window", environ.get("SENTINEL_WINDOW"), "rounds kept in memory for a dump", type=_positive, metavar="N")
    guard = environ.get("SENTINEL_GUARD")
    guard_help = "what happens to a step whose gradients are nonfinite: observe (default), skip or halt (exit code 93)"
    flag("guard", guard, guard_help, type=_guard, metavar="POLICY")
    skips = environ.get("SENTINEL_MAX_SKIPS")
    skips_help = "steps that may be skipped in a row and in all before the guard halts (default: 10,100)"
    flag("max-skips", skips, skips_help, type=_skips, metavar="N[,TOTAL]")
    for name, help_ in (
        ("no-agent", "plain torchrun: nothing of Sentinel runs"),
        ("quiet", "say nothing of a healthy run"),
    ):
        spellings = dict.fromkeys((f"--sentinel-{name}", f"--sentinel_{name.replace('-', '_')}"))
        group.add_argument(*spellings, action="store_true", default=_truth(environ, name), help=help_)


def _dump_level(text: str) -> str:
    if text not in DUMP_LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(DUMP_LEVELS)}")
    return text


def _function(text: str) -> str:
    module, _, function = text.partition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not module:function")
    return text


def _guard(text: str) -> str:
    if text not in GUARDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(GUARDS)}")
    return text


def _skips(text: str) -> tuple[int, int]:
    """``N`` in a row and ten times as many in all, or ``N,TOTAL``."""
    in_a_row, comma, in_all = text.partition(",")
    return _positive(in_a_row), _positive(in_all) if comma else 10 * _positive(in_a_row)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _truth(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(f"SENTINEL_{name.upper().replace('-', '_')}", "0").strip().lower()
    return value not in ("", "0", "false", "no", "off")


def _named_run(run_id: str | None) -> str | None:
    if run_id and not _is_run_id(run_id):
        raise UsageError(f"{run_id[:40]!r} cannot be a run id", f"use at most {MAX_RUN_ID} printable characters")
    return run_id


def _is_run_id(text: str) -> bool:
    return 0 < len(text) <= MAX_RUN_ID and text.isprintable()


def _http_bind(text: str) -> str | None:
    if text == HTTP_OFF:
        return None
    try:
        split_host_port(text)
    except ValueError as error:
        raise UsageError(f"--sentinel-http-bind: {error}", f"for example 127.0.0.1:9401, or '{HTTP_OFF}'") from error
    return text


def _rendezvous_id(torchrun: argparse.Namespace) -> str | None:
    """The job's own id, unless torchrun's default says that there is none (or a coordinator would refuse it)."""
    return torchrun.rdzv_id if torchrun.rdzv_id != "none" and _is_run_id(torchrun.rdzv_id) else None


def _read_join(path: str | None, endpoint: str | None, server_key: str | None) -> Join | None:
    """Join of the file, with endpoint and key replaced where given. Raises UsageError."""
    if path is None:
        if endpoint is None and server_key is None:
            return None
        raise UsageError(
            "an endpoint or a server key alone cannot join a coordinator",
            "give --sentinel-join FILE too: the coordinator's join.json holds the client's own keys",
        )
    try:
        join = Join.read(Path(path))
        replaced = {"endpoint": endpoint or join.endpoint, "server_key": server_key or join.server_key}
        return Join.model_validate({**join.model_dump(), **replaced})
    except OSError as error:
        raise UsageError(
            f"cannot read join file {path} ({error.strerror})", "a coordinator writes join.json"
        ) from error
    except ValueError as error:
        raise UsageError(str(error).splitlines()[0], "copy join.json from the coordinator's run directory") from error
