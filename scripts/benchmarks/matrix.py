"""How often attribution is right: random faults put into small trainings under ``sentinel run``, and what was said of each.

Prints a scoreboard by way of reducing and phase, the confusion of stages, every case that came out wrong, false alarms and the
time. Exits 1 below 99 % right in kind, stage and ranks, or with any false alarm. The seed of the draw is printed first.
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

from matrix_cases import LEFT_OUT, NOTHING, PHASES, Case, Right, Way, draw, right

RANKS = Path(__file__).with_name("matrix_ranks.py")
SENTINEL = (sys.executable, "-m", "sentinel.cli.main")
BAR = 0.99
SECONDS_A_CASE = 15.0  # of a launch's time limit, on a machine that is busy with others
START_SECONDS = 120.0


class Result(NamedTuple):
    """One case and what came of it. ``found``: the verdicts dated to the fault's round; ``alarms``: those of its healthy rounds."""

    case: Case
    found: tuple[Right, ...]
    alarms: tuple[str, ...]
    happened: bool
    seconds: float

    @property
    def passed(self) -> bool:
        """Exactly the verdict that can be known, or exactly nothing."""
        wanted = right(self.case)
        return self.happened and self.found == (() if wanted == NOTHING else (wanted,))


class Ended(Exception):
    """A launch that did not run all its cases; the text says how it ended."""


def run_world(cases: Sequence[Case], world: int, folder: Path) -> list[Result]:
    """Run the cases of one world size in one launch. Raises ``Ended``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    _launch(world, folder, START_SECONDS + SECONDS_A_CASE * len(cases))
    logs = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]
    return list(_judge(cases, logs, incidents_of(folder / "run")))


def _launch(world: int, folder: Path, seconds: float) -> None:
    words = ["run", "--sentinel-run-dir", str(folder / "run"), "--standalone", "--nproc-per-node", str(world)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "PET_"))}
    kept |= {"OMP_NUM_THREADS": "1", "SENTINEL_AGENT_OPTIONS": json.dumps({"dump_level": "stats"})}
    command = [*SENTINEL, *words, str(RANKS), str(folder / "cases.json"), str(folder)]
    with (folder / "output.txt").open("w") as output:
        try:
            ended = subprocess.run(command, env=kept, stdout=output, stderr=output, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise Ended(f"world {world} still runs after {seconds:.0f} s; see {output.name}") from None
    if not (folder / f"rank-{world - 1}.json").exists():
        tail = (folder / "output.txt").read_text()[-2000:]
        raise Ended(f"world {world} ended with {ended.returncode}:\n{tail}")


def incidents_of(run_dir: Path) -> list[dict[str, Any]]:
    """The incidents of a run, as another program reads them."""
    words = ["incidents", "ls", "--run-dir", str(run_dir), "-o", "json", "--exit-zero"]
    listed = subprocess.run([*SENTINEL, *words], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(listed.stdout)["incidents"]  # type: ignore[no-any-return]


def _judge(
    cases: Sequence[Case], logs: list[list[dict[str, Any]]], incidents: list[dict[str, Any]]
) -> Iterator[Result]:
    """Match incidents with cases by the rounds that each case ran in."""
    left = list(incidents)
    for case, *done in zip(cases, *logs, strict=True):
        first, fault, last = (done[0][name] for name in ("first", "fault", "last"))
        assert all((one["first"], one["last"]) == (first, last) for one in done), f"ranks lost step in case {case}"
        mine = [one for one in left if first <= one["round"] <= last]
        left = [one for one in left if one not in mine]
        yield Result(
            case,
            tuple(_said(one) for one in mine if one["round"] == fault),
            tuple(_line(one) for one in mine if one["round"] != fault),
            not any(one["missing"] for one in done),
            max(one["seconds"] for one in done),
        )
    assert not left, f"incidents of no case: {[_line(one) for one in left]}"


def _said(incident: dict[str, Any]) -> Right:
    return Right(incident["kind"], incident["stage"], tuple(sorted(incident["suspect_ranks"])))


def _line(incident: dict[str, Any]) -> str:
    return f"round {incident['round']}: {incident['kind']}/{incident['stage']} {incident['suspect_ranks']} ({incident['rule']})"


def scoreboard(results: Sequence[Result]) -> Iterator[str]:
    """Right of all, by way of reducing and phase."""
    yield f"{'way of reducing':16}" + "".join(f"{phase:>12}" for phase in (*PHASES, "all"))
    for way in Way:
        mine = [one for one in results if one.case.way is way]
        if mine:
            cells = [[one for one in mine if one.case.phase == phase] for phase in PHASES]
            yield f"{way:16}" + "".join(_cell(cell) for cell in (*cells, mine))
    columns = [[one for one in results if one.case.phase == phase] for phase in PHASES]
    yield f"{'all':16}" + "".join(_cell(cell) for cell in (*columns, results))


def _cell(results: Sequence[Result]) -> str:
    if not results:
        return f"{'.':>12}"
    return f"{f'{sum(one.passed for one in results)} of {len(results)}':>12}"


def confusion(results: Sequence[Result]) -> Iterator[str]:
    """How often which stage could be known (rows) and was said (columns)."""
    cells = Counter((right(one.case).stage, one.found[0].stage if one.found else "none") for one in results)
    rows, columns = sorted({row for row, _ in cells}), sorted({column for _, column in cells})
    yield f"{'known / said':14}" + "".join(f"{column:>20}" for column in columns)
    for row in rows:
        yield f"{row:14}" + "".join(f"{cells[row, column] or '.':>20}" for column in columns)


def wrong(results: Sequence[Result]) -> Iterator[str]:
    """A line for each case that came out wrong, and for each false alarm."""
    for one in results:
        if not one.happened:
            yield f"fault did not happen in {one.case}"
        elif not one.passed:
            said = ", ".join(f"{v.kind}/{v.stage} {list(v.ranks)}" for v in one.found) or "nothing"
            known = right(one.case)
            yield f"WRONG {one.case}: known {known.kind}/{known.stage} {list(known.ranks)}, said {said}"
        for alarm in one.alarms:
            yield f"ALARM in the healthy rounds of {one.case}: {alarm}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the draw (default: the time)")
    parser.add_argument("--cases", type=int, default=240, help="how many faults")
    parser.add_argument("--worlds", default="2,3,4", help="numbers of ranks, one launch for each")
    parser.add_argument("--only", default="", metavar="TEXT", help='only cases such as "loop float16" or "lost wire"')
    parser.add_argument("--keep", type=Path, help="leave run directories and logs here")
    chosen = parser.parse_args(argv)
    worlds = [int(world) for world in chosen.worlds.split(",")]
    try:
        cases = draw(chosen.seed, chosen.cases, worlds, chosen.only)
    except ValueError as error:
        print(
            f"sentinel: error: {error}\nhint: a case reads like 'ddp fp16 hook float32 world 2: nan raw'",
            file=sys.stderr,
        )
        return 2
    print(f"{len(cases)} faults, seed {chosen.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sentinel-matrix-") as temporary:
        try:
            results = run(cases, chosen.keep or Path(temporary))
        except Ended as error:
            print(f"sentinel: error: {error}", file=sys.stderr)
            return 1
    return report(results, time.monotonic() - began)


def run(cases: Sequence[Case], folder: Path) -> list[Result]:
    """Run all cases, one launch for each world size. Raises ``Ended``."""
    results: list[Result] = []
    for world in sorted({case.world for case in cases}):
        mine = [case for case in cases if case.world == world]
        began = time.monotonic()
        results += run_world(mine, world, folder / f"world-{world}")
        print(f"world {world}: {len(mine)} cases, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return results


def report(results: Sequence[Result], seconds: float) -> int:
    """Print everything; 0 if the bar is met."""
    told = [one for one in results if right(one.case) != NOTHING]
    quiet = [one for one in results if right(one.case) == NOTHING]
    print("\n".join([*scoreboard(told), "", *confusion(results), "", *wrong(results)]))
    print("\n".join(f"not drawn: {reason}" for reason in LEFT_OUT))
    passed, alarms = sum(one.passed for one in told), sum(len(one.alarms) for one in results)
    alarms += sum(len(one.found) for one in quiet)
    share = passed / len(told) if told else 1.0
    median = sorted(one.seconds for one in results)[len(results) // 2]
    print(
        f"right {passed} of {len(told)} ({share:.1%}) · nobody can tell, and nothing said: "
        f"{sum(one.passed for one in quiet)} of {len(quiet)} · false alarms {alarms} · {seconds:.0f} s, {median:.2f} s a case"
    )
    return 0 if share >= BAR and not alarms and all(one.happened for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
