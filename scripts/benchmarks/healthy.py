"""How often a healthy training is called anything else: many rounds of ordinary trainings under ``sentinel run``.

Prints rounds, incidents and rounds a second for each training, then what the agents dropped and the faults they swallowed, by
reason. Exits 1 if there is any incident, any fault, or a round that was not checked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sentinel.coordinator.store import IncidentReader
from sentinel.incidents.events import Received
from sentinel.incidents.model import Incident
from sentinel.wire.messages import Counted

RANKS = Path(__file__).with_name("healthy_ranks.py")
SENTINEL = (sys.executable, "-m", "sentinel.cli.main")
LAUNCHES = (
    (
        2,
        ("ddp", "clipping", "accumulation", "accumulation_no_sync", "bfloat16_autocast", "float16_scaler", "hand_loop"),
    ),
    (2, ("fsdp2", "batch_norm", "dropout", "gradient_checkpointing", "gan", "compiled")),
    (4, ("hsdp",)),
    (2, ("join",)),
)
"""(ranks, trainings) of each launch. Uneven inputs have one of their own: afterwards ranks count different rounds."""
SECONDS_A_ROUND = 0.3  # of a launch's time limit, on a machine that is busy with others
START_SECONDS = 120.0


class Launch(NamedTuple):
    """What one launch left behind. ``rounds`` were judged; ``counted`` are drops and faults by reason, over all ranks."""

    ranks: int
    trainings: list[dict[str, Any]]
    incidents: tuple[Incident, ...]
    rounds: int
    benign_skips: int
    drops: Counter[str]
    faults: Counter[str]


class Ended(Exception):
    """A launch that did not come to its end; the text says how it ended."""


def launch(ranks: int, trainings: Sequence[str], rounds: int, folder: Path) -> Launch:
    """Run these trainings one after another in one launch. Raises ``Ended``."""
    folder.mkdir(parents=True)
    words = ["run", "--sentinel-run-dir", str(folder / "run"), "--standalone", "--nproc-per-node", str(ranks)]
    command = [*SENTINEL, *words, str(RANKS), str(rounds), str(folder), *trainings]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "PET_"))}
    kept |= {"OMP_NUM_THREADS": "1", "SENTINEL_AGENT_OPTIONS": json.dumps({"dump_level": "stats"})}
    seconds = START_SECONDS + SECONDS_A_ROUND * rounds * len(trainings)
    with (folder / "output.txt").open("w") as output:
        try:
            ended = subprocess.run(command, env=kept, stdout=output, stderr=output, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise Ended(f"{', '.join(trainings)} still run after {seconds:.0f} s") from None
    if ended.returncode:
        raise Ended(f"{', '.join(trainings)} ended with {ended.returncode}:\n{Path(output.name).read_text()[-2000:]}")
    return _read(ranks, folder)


def _read(ranks: int, folder: Path) -> Launch:
    trainings = json.loads((folder / "rank-0.json").read_text())
    with IncidentReader(folder / "run") as reader:
        (run,) = reader.runs()
        reports = [e.event.report for e in reader.events(run.run_id) if isinstance(e.event, Received)]
        incidents = tuple(reader.incidents(run.run_id))
    last = {(r.node, r.rank): r for r in reports if isinstance(r, Counted)}
    drops, faults = Counter[str](), Counter[str]()
    for one in last.values():
        drops.update(one.drops)
        faults.update(one.faults)
    return Launch(ranks, trainings, incidents, run.counts["rounds_checked"], run.counts["benign_skips"], drops, faults)


def table(launches: Sequence[Launch]) -> Iterator[str]:
    """A line per training, then a line for each incident."""
    yield f"{'training':24}{'ranks':>6}{'rounds':>8}{'incidents':>11}{'rounds/s':>10}"
    for one in launches:
        for training in one.trainings:
            rounds = training["last"] - training["first"] + 1
            mine = [i for i in one.incidents if training["first"] <= i.round <= training["last"]]
            speed = rounds / training["seconds"]
            yield f"{training['training']:24}{one.ranks:>6}{rounds:>8}{len(mine):>11}{speed:>10.0f}"
    for one in launches:
        for incident in one.incidents:
            ranks = list(incident.suspect_ranks)
            yield f"ALARM round {incident.round}: {incident.kind}/{incident.stage} {ranks} ({incident.rule}) {incident.reason}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000, help="of all trainings together, about")
    parser.add_argument("--only", default="", metavar="ddp,gan", help="only these trainings")
    parser.add_argument("--keep", type=Path, help="leave run directories and logs here")
    chosen = parser.parse_args(argv)
    wanted = tuple(filter(None, chosen.only.split(",")))
    plan = [(ranks, [n for n in names if not wanted or n in wanted]) for ranks, names in LAUNCHES]
    total = sum(len(names) for _, names in plan)
    if not total:
        known = " ".join(name for _, names in LAUNCHES for name in names)
        print(f"sentinel: error: no such training: {chosen.only}\nhint: there are {known}", file=sys.stderr)
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sentinel-healthy-") as temporary:
        try:
            launches = run(plan, max(-(-chosen.rounds // total), 1), chosen.keep or Path(temporary))
        except Ended as error:
            print(f"sentinel: error: {error}", file=sys.stderr)
            return 1
    return report(launches, time.monotonic() - began)


def run(plan: Sequence[tuple[int, Sequence[str]]], rounds: int, folder: Path) -> list[Launch]:
    """Every launch of the plan that has a training. Raises ``Ended``."""
    launches = []
    for number, (ranks, names) in enumerate(plan):
        if names:
            began = time.monotonic()
            launches.append(launch(ranks, names, rounds, folder / str(number)))
            print(f"{', '.join(names)}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return launches


def report(launches: Sequence[Launch], seconds: float) -> int:
    """Print everything; 0 if nothing was said."""
    print("\n".join(table(launches)))
    trained = sum(t["last"] - t["first"] + 1 for one in launches for t in one.trainings)
    checked, alarms = sum(one.rounds for one in launches), sum(len(one.incidents) for one in launches)
    skips = sum(one.benign_skips for one in launches)
    drops, faults = Counter[str](), Counter[str]()
    for one in launches:
        drops.update(one.drops)
        faults.update(one.faults)
    print(
        f"{checked} rounds checked ({trained} on rank 0) · incidents {alarms} · benign skips {skips} · "
        f"drops {dict(drops) or 'none'} · faults {dict(faults) or 'none'} · {seconds:.0f} s"
    )
    return 0 if not alarms and not faults and checked >= trained else 1


if __name__ == "__main__":
    sys.exit(main())
