"""How often the verdict is right: every script of a corpus under ``sentinel run``, its incidents against what is expected.

Prints a scoreboard (kind, stage, suspect ranks, step and cause of each script's first incident), a confusion matrix of kinds, the
false alarms of clean scripts, and the time. Exits 1 unless all kinds, stages, ranks and steps are right and nothing clean alarms;
``cause`` is a first reading that replay settles, so it is shown but does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

CORPUS = Path(__file__).parents[2] / "tests" / "corpus"
SENTINEL = ("-m", "sentinel.cli.main")
RUN_SECONDS = 240.0
COUNTED = ("kind", "stage", "ranks", "step")  # what must be right; the first column of a clean script is quiet or not
COLUMNS = (*COUNTED, "cause")
NONE = "none"


class Expected(NamedTuple):
    """What is known of a script's fault. No ``kinds``: it is healthy, and any incident is a false alarm."""

    kinds: tuple[str, ...]
    stage: str
    ranks: tuple[int, ...]
    step: int | None
    cause: str

    @property
    def clean(self) -> bool:
        """True if nothing may be said of this script."""
        return not self.kinds


class Score(NamedTuple):
    """Right or wrong, by column; ``quiet`` counts for clean scripts only. ``found`` is the first incident's kind."""

    found: str
    right: dict[str, bool]

    @property
    def passed(self) -> bool:
        """True if everything that counts is right."""
        return all(self.right[name] for name in self.right if name != "cause")


class Result(NamedTuple):
    """One script's outcome; ``incidents`` None if they could not be read."""

    name: str
    expected: Expected
    score: Score
    exit_code: int
    seconds: float
    incidents: list[dict[str, Any]] | None
    tail: str


def read_expected(corpus: Path) -> dict[str, Expected]:
    """``expected.json`` of a corpus: script -> what is expected. Raises OSError, KeyError or ValueError."""
    scripts = json.loads((corpus / "expected.json").read_text())["scripts"]
    return {name: _expected(one["expected"]) for name, one in sorted(scripts.items())}


def _expected(one: dict[str, Any]) -> Expected:
    return Expected(
        tuple(one["accept_kinds"]), one["stage"], tuple(sorted(one["origin_ranks"])), one["step"], one["cause"]
    )


def judge(expected: Expected, incidents: list[dict[str, Any]] | None) -> Score:
    """Compare a script's first incident with what is expected; a list that could not be read is wrong in everything."""
    if incidents is None:
        return Score("unread", dict.fromkeys(("quiet",) if expected.clean else COLUMNS, False))
    first = min(incidents, key=lambda i: (i["round"], i["opened_at"]), default=None)
    if expected.clean:
        return Score(first["kind"] if first else NONE, {"quiet": first is None})
    if first is None:
        return Score(NONE, dict.fromkeys(COLUMNS, False))
    return Score(
        first["kind"],
        {
            "kind": first["kind"] in expected.kinds,
            "stage": first["stage"] == expected.stage,
            "ranks": tuple(sorted(first["suspect_ranks"])) == expected.ranks,
            "step": first["step"] == expected.step,
            "cause": first["cause"] == expected.cause,
        },
    )


def run_script(corpus: Path, name: str, expected: Expected, python: str = sys.executable) -> Result:
    """Run one script under the launcher, under a name that tells nothing of its fault, and judge what was found."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sentinel-accuracy-") as folder:
        script, run_dir = Path(folder, f"s{name[:2]}.py"), Path(folder, "run")
        shutil.copy(corpus / f"{name}.py", script)
        exit_code, tail = _launch(script, run_dir, python)
        incidents = _incidents(run_dir, python)
    score = judge(expected, incidents)
    return Result(name, expected, score, exit_code, time.monotonic() - began, incidents, tail)


def _launch(script: Path, run_dir: Path, python: str) -> tuple[int, str]:
    words = ["run", "--sentinel-run-dir", str(run_dir), "--standalone", "--nproc-per-node", "2", str(script)]
    try:
        ran = _sentinel(python, words, cwd=script.parent)
    except subprocess.TimeoutExpired:
        return 124, f"still running after {RUN_SECONDS:.0f} s"
    return ran.returncode, (ran.stdout + ran.stderr)[-2000:]


def _incidents(run_dir: Path, python: str) -> list[dict[str, Any]] | None:
    try:
        listed = _sentinel(python, ["incidents", "ls", "--run-dir", str(run_dir), "-o", "json"], cwd=run_dir.parent)
        return json.loads(listed.stdout)["incidents"]  # type: ignore[no-any-return]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        return None


def _sentinel(python: str, words: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "PET_"))}
    env = {**kept, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python}
    command = [python, *SENTINEL, *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)


def run_all(corpus: Path, wanted: dict[str, Expected], jobs: int, python: str = sys.executable) -> list[Result]:
    """Run scripts, ``jobs`` at a time, one line of progress for each as it ends."""
    results = []
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run_script, corpus, name, expected, python) for name, expected in wanted.items()]
        for number, done in enumerate(as_completed(running), 1):
            one = done.result()
            results.append(one)
            verdict = "right" if one.score.passed else "WRONG"
            print(f"[{number:2} of {len(wanted)}] {one.name:38} {verdict}  {one.seconds:.1f} s", file=sys.stderr)
    return sorted(results)


def scoreboard(results: Sequence[Result]) -> Iterator[str]:
    """A line per script, then the sums of its columns."""
    yield f"{'script':38}" + "".join(f"{name:>7}" for name in COLUMNS) + "  found"
    for one in results:
        yield _row(one)
    faulty = [one for one in results if not one.expected.clean]
    sums = {name: sum(one.score.right[name] for one in faulty) for name in COLUMNS}
    yield f"{f'right of {len(faulty)} with a fault':38}" + "".join(f"{sums[name]:7}" for name in COLUMNS)


def _row(one: Result) -> str:
    if one.expected.clean:
        cells = f"{'clean':>7}" + " " * 28
    else:
        cells = "".join(f"{'right' if one.score.right[name] else 'WRONG':>7}" for name in COLUMNS)
    found = [f"{i['kind']}/{i['stage']} ranks {i['suspect_ranks']} step {i['step']}" for i in one.incidents or ()]
    said = "; ".join(found) or ("nothing" if one.incidents is not None else "unread")
    return f"{one.name:38}{cells}  {said}"


def confusion(results: Sequence[Result]) -> Iterator[str]:
    """How often which kind was expected (rows) and found (columns); the first kind accepted names the row."""
    cells = Counter((_row_kind(one), one.score.found) for one in results)
    rows = sorted({row for row, _ in cells})
    columns = sorted({column for _, column in cells})
    yield f"{'expected / found':22}" + "".join(f"{column:>22}" for column in columns)
    for row in rows:
        yield f"{row:22}" + "".join(f"{cells[row, column] or '.':>22}" for column in columns)


def _row_kind(one: Result) -> str:
    if one.score.found in one.expected.kinds:
        return one.score.found  # one of several that are right
    return one.expected.kinds[0] if one.expected.kinds else NONE


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--corpus", type=Path, default=CORPUS, help="scripts and expected.json (default: the project's)"
    )
    parser.add_argument("--only", default="", metavar="01,03", help="only scripts whose names begin with one of these")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time; each has two ranks and a launcher")
    parser.add_argument(
        "--cold",
        action="store_true",
        help="start every process anew; else they are forked from one that has imported torch",
    )
    parser.add_argument("--out", type=Path, help="write every incident and score here as JSON")
    chosen = parser.parse_args(argv)
    try:
        expected = read_expected(chosen.corpus)
    except (OSError, KeyError, ValueError) as error:
        print(f"sentinel: error: {chosen.corpus} is no corpus: {error}", file=sys.stderr)
        print("hint: a corpus is a folder of scripts with an expected.json", file=sys.stderr)
        return 2
    prefixes = tuple(filter(None, chosen.only.split(",")))
    wanted = {name: one for name, one in expected.items() if not prefixes or name.startswith(prefixes)}
    began = time.monotonic()
    with _interpreter(cold=chosen.cold) as python:
        results = run_all(chosen.corpus, wanted, max(chosen.jobs, 1), python)
    return report(results, time.monotonic() - began, chosen.out)


@contextlib.contextmanager
def _interpreter(*, cold: bool) -> Iterator[str]:
    """The Python that everything is run by; a warm one makes it three times as fast."""
    if cold:
        yield sys.executable
        return
    from warm import Warm

    with contextlib.closing(Warm()) as warm:
        yield str(warm.python)


def report(results: Sequence[Result], seconds: float, out: Path | None) -> int:
    """Print everything; 0 if the bar is met."""
    print("\n".join([*scoreboard(results), "", *confusion(results), ""]))
    clean = [one for one in results if one.expected.clean]
    alarms = sum(not one.score.passed for one in clean)
    passed = sum(one.score.passed for one in results)
    print(f"right {passed} of {len(results)} · false alarms {alarms} of {len(clean)} clean · {seconds:.0f} s")
    for one in results:
        if one.incidents is None or one.exit_code == 124:
            print(f"{one.name} ended with {one.exit_code}:\n{one.tail}", file=sys.stderr)
    if out is not None:
        rows = {one.name: one._asdict() | {"score": one.score._asdict()} for one in results}
        out.write_text(json.dumps(rows, indent=1, default=str))
    return 0 if results and passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
