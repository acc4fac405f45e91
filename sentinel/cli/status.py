"""``sentinel status``: is the run alive, how far is it, and was anything found so far?

Owns the command and its pages. A run directory tells what its database knows; ``--http`` tells what a running coordinator sees.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sentinel.cli.options import Http, Output, RunDir, Token
from sentinel.cli.output import OutputFormat, put
from sentinel.cli.source import Pages, RunDirectory, choose
from sentinel.postmortem.text import columns, labelled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sentinel.coordinator.snapshot import RunStatus
    from sentinel.coordinator.store import RunRecord

RANKS_SHOWN = 32


def status(
    run_dir: RunDir = None,
    http: Http = None,
    token: Token = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show the runs of a run directory or a coordinator: state, ranks, rounds checked, incidents."""
    source = choose(run_dir, http, token)
    if isinstance(source, Pages):
        live = source.status()
        as_json = [run.model_dump(mode="json") for run in live]
        pages = [_live(run) for run in live]
    else:
        assert isinstance(source, RunDirectory)
        kept = source.runs()
        as_json = [run.model_dump(mode="json") for run in kept]
        pages = [_kept(run) for run in kept]
    if output is OutputFormat.JSON:
        put(json.dumps({"schema_version": 1, "runs": as_json}, indent=1))
    else:
        put("\n\n".join(pages) or "no run has reported yet")


def _kept(run: RunRecord) -> str:
    ended = f"ended {run.ended_at:%Y-%m-%d %H:%M:%S} UTC" if run.ended_at else "going on, or its coordinator was killed"
    return labelled(
        [
            ("run", run.run_id),
            ("state", ended),
            ("started", f"{run.started_at:%Y-%m-%d %H:%M:%S} UTC"),
            ("ranks", str(run.world_size or "not known")),
            ("incidents", str(run.incidents)),
            ("counts", _counts(run.counts)),
        ]
    )


def _live(run: RunStatus) -> str:
    page = labelled(
        [
            ("run", run.run_id),
            ("state", "ended" if run.ended else "going on"),
            ("ranks", f"{run.world_size or 'not known'} ({_counts(run.states)})"),
            (
                "rounds",
                f"{run.rounds_checked} checked, last {run.last_round}, {run.benign_skips} skipped by a GradScaler",
            ),
            ("open", f"{run.open_incidents} incident(s)"),
            ("dropped", _counts(run.drops)),
        ]
    )
    if not run.ranks:
        return page
    header = ("RANK", "STATE", "NODE", "STEP", "ROUND", "LAST SEEN")
    rows = [
        (
            str(r.rank),
            r.state,
            str(r.node),
            str(r.step),
            str(r.last_round),
            f"{datetime.fromtimestamp(r.last_seen, UTC):%H:%M:%S}",
        )
        for r in run.ranks[:RANKS_SHOWN]
    ]
    rest = len(run.ranks) - RANKS_SHOWN
    return f"{page}\n\n{columns(header, rows, indent='  ')}" + (f"\n  … and {rest} more (-o json)" if rest > 0 else "")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in counts.items()) or "none"
