"""``sentinel dump``: ask for bundles, list, verify, show and remove them.

Owns the commands. Bundles are read by ``bundle/reader.py``, compared by ``bundle/verify.py``, and their page is
``postmortem/bundle_page.py``.
"""

from __future__ import annotations

import json
import shutil
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from sentinel.bundle.reader import Bundle, BundleRefused
from sentinel.bundle.verify import verify
from sentinel.cli.act import coordinator
from sentinel.cli.options import Http, Output, RunDir, RunId, Token
from sentinel.cli.output import ExitCode, OutputFormat, fail, put, say, say_error
from sentinel.cli.source import Pages, newest_run
from sentinel.coordinator.acting import PlannedDump
from sentinel.incidents.describe import plural, rank_list
from sentinel.postmortem.bundle_page import describe_bundle
from sentinel.postmortem.bundle_record import BundleList, bundle_record
from sentinel.postmortem.text import columns
from sentinel.wire.names import BUNDLES

dump_app = typer.Typer(help="The bundles: what every rank kept of a faulty round.", no_args_is_help=True)

BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle's directory, or its manifest.json.")]


@dump_app.command("ls")
def list_bundles(run_dir: RunDir = None, output: Output = OutputFormat.TABLE) -> None:
    """List the bundles of a run directory, and whether each is complete."""
    where = run_dir or newest_run()
    if not where.is_dir():
        fail(f"no run directory {where}", "sentinel run says at its start and end where it is")
    bundles, refused = _open_all(where)
    if output is OutputFormat.JSON:
        records = tuple(bundle_record(bundle) for bundle in bundles)
        put(BundleList(bundles=records, refused=tuple(refused)).model_dump_json(indent=1))
    elif bundles:
        put(columns(("BUNDLE", "STEP", "STATE", "PARTS", "INCIDENTS"), (_row(bundle) for bundle in bundles)))
    elif not refused:
        say(f"no bundles in {where}")
    for line in refused:
        say_error(line)
    if refused:
        raise typer.Exit(int(ExitCode.REFUSED))


@dump_app.command("verify")
def verify_bundle(bundle: BundlePath, output: Output = OutputFormat.TABLE) -> None:
    """Compare a bundle with its manifest: every file there, none extra, sizes and SHA-256 as committed. Exits 1, or 6."""
    opened = open_bundle(bundle)
    problems = verify(bundle)
    if output is OutputFormat.JSON:
        found = [{"path": p.path, "kind": p.kind, "detail": p.detail} for p in problems]
        put(
            json.dumps(
                {"schema_version": 1, "bundle": opened.id, "partial": opened.partial, "problems": found}, indent=1
            )
        )
    else:
        for problem in problems:
            put(str(problem))
    if opened.manifest is not None and problems:
        fail(
            f"bundle {opened.id}: {len(problems)} problem(s)", "it is not what was committed; do not trust its contents"
        )
    _leave_if_partial(opened)
    if output is OutputFormat.TABLE:
        files = len(opened.manifest.files) if opened.manifest else 0
        put(f"bundle {opened.id}: complete, {files} files as committed")


@dump_app.command("show")
def show_bundle(
    bundle: BundlePath,
    rank: Annotated[list[int] | None, typer.Option("--rank", metavar="N", help="Only these ranks in full.")] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show a bundle: parts, batches, odd samples, statistics of gradients and parameters. Exits 6 if it is partial."""
    opened = open_bundle(bundle)
    absent = sorted(set(rank or ()) - set(opened.ranks))
    if absent:
        fail(f"bundle {opened.id} has no part of {rank_list(absent)} here", f"it has {rank_list(opened.ranks)}")
    try:
        if output is OutputFormat.JSON:
            parts = tuple(p.header for r, p in sorted(opened.parts.items()) if not rank or r in rank)
            put(bundle_record(opened, parts).model_dump_json(indent=1))
        else:
            put(describe_bundle(opened, rank))
    except BundleRefused as refusal:
        fail(str(refusal), "sentinel dump verify names every difference", ExitCode.REFUSED)
    _leave_if_partial(opened)


@dump_app.command("now")
def dump_now(
    run_dir: RunDir = None,
    http: Http = None,
    token: Token = None,
    run_id: RunId = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Let every rank of a running job write its part of one round, about a second ahead. Training goes on."""
    asked = coordinator(run_dir, http, token)
    query = urllib.parse.urlencode({"run_id": run_id or only_run(asked)})
    planned = PlannedDump.model_validate_json(asked.post(f"/api/v1/dump?{query}"))
    if output is OutputFormat.JSON:
        put(planned.model_dump_json(indent=1))
    else:
        put(f"{rank_list(planned.ranks)} will write round {planned.round}: {planned.bundle}")


@dump_app.command("merge")
def merge_bundle(
    bundle: BundlePath,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="A safetensors file to write.")],
) -> None:
    """Put the parameters of all parts together, shards too, into one file that a single process can load."""
    from sentinel.bundle.merge import Merged

    opened = open_bundle(bundle)
    try:
        merged = Merged(opened)
        merged.write(to)
    except BundleRefused as refusal:
        fail(str(refusal), "sentinel dump show BUNDLE says what each part holds", ExitCode.REFUSED)
    except OSError as error:
        fail(f"cannot write {to} ({error.strerror or error})", "name a file in a folder that exists and is writable")
    put(f"{plural(len(merged.names), 'tensor')} of {rank_list(opened.ranks)} written to {to}")


@dump_app.command("rm")
def remove_bundles(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Directories of bundles.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove bundles for good: the batches of a faulty round are real training data. Incidents stay."""
    for path in bundles:
        if path.is_symlink():
            fail(f"{path} is a link", "name the bundle's own directory", ExitCode.REFUSED)
    directories = [open_bundle(path).path for path in bundles]
    if not yes:
        typer.confirm(f"remove {plural(len(directories), 'bundle')} for good?", abort=True, err=True)
    for directory in directories:
        try:
            shutil.rmtree(directory)
        except OSError as error:
            fail(f"cannot remove {directory} ({error.strerror})", "part of it may be gone; sentinel dump verify tells")
        say(f"removed {directory}")


def only_run(pages: Pages) -> str:
    """The run that a coordinator is watching. Leaves with a hint unless it is exactly one."""
    going_on = [run.run_id for run in pages.status() if not run.ended]
    if len(going_on) != 1:
        fail(
            f"{len(going_on)} runs are going on", "choose one: --run-id ID; sentinel status lists them", ExitCode.USAGE
        )
    return going_on[0]


def open_bundle(path: Path) -> Bundle:
    """Open a bundle that a command names. Leaves with a hint if it cannot be read."""
    try:
        return _readable(path)
    except BundleRefused as refusal:
        code = ExitCode.REFUSED if path.exists() else ExitCode.FAILURE
        fail(str(refusal), "a bundle is a directory below RUN_DIR/bundles; sentinel dump ls lists them", code)


def _readable(path: Path) -> Bundle:
    bundle = Bundle.open(path)
    _ = bundle.missing_ranks  # reads the parts where no manifest says it, so that a refusal comes here and not later
    return bundle


def _open_all(run_dir: Path) -> tuple[list[Bundle], list[str]]:
    opened: list[Bundle] = []
    refused: list[str] = []
    for path in _bundle_paths(run_dir / BUNDLES):
        try:
            opened.append(_readable(path))
        except BundleRefused as refusal:
            refused.append(f"{path.name}: {refusal}")
    return opened, refused


def _bundle_paths(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _leave_if_partial(bundle: Bundle) -> None:
    if bundle.partial:
        missing = f"nothing whole from {rank_list(bundle.missing_ranks)}" if bundle.missing_ranks else "no manifest"
        say_error(
            f"bundle {bundle.id} is partial: {missing}", "what is there can be read; a rank died, or its disk was full"
        )
        raise typer.Exit(int(ExitCode.PARTIAL))


def _row(bundle: Bundle) -> tuple[str, ...]:
    manifest = bundle.manifest
    of = f" of {manifest.world_size}" if manifest else ""
    return (
        bundle.id,
        str(manifest.step) if manifest else "-",
        "partial" if bundle.partial else "complete",
        f"{len(bundle.ranks)}{of}",
        ", ".join(manifest.incidents) if manifest else "-",
    )
