"""How often replay is right: every faulty script of a corpus is run, its bundle replayed, the result held against what is known.

Prints, per script, whether the first bad op, its line, the cause and the float32 column are right, and whether the recorded
gradients came back bit by bit; then forced dumps of the clean scripts, of which nothing may be blamed. Exits 1 below the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

CORPUS = Path(__file__).parents[2] / "tests" / "corpus"
SENTINEL = (sys.executable, "-m", "sentinel.cli.main")
RUN_SECONDS = 240.0
FORCED_ROUND = 2
COLUMNS = ("op", "line", "cause", "fp32", "bits")
BAR = {"op": 1, "line": 1, "cause": 1, "fp32": 0, "bits": 0}  # scripts that may be wrong, by column

# Where a value is born in several ops at once, any of them is right. Names are those of ``aten`` without overload.
BORN = {
    "01": ({"nll_loss_forward"}, "cross_entropy"),
    "03": ({"div"}, "x.std("),
    "04": ({"_softmax"}, "softmax"),
    "07": ({"std"}, "r.std()"),
    "09": ({"addmm"}, "self.wo("),
    "11": ({"add"}, "causal + pad"),
    "15": ({"allreduce_"}, "dist.all_reduce"),
    "17": ({"div"}, "left.norm()"),
    "19": ({"chunk_cat", "_to_copy"}, "net(x)"),
    "29": ({"mse_loss"}, "mse_loss"),
    "32": ({"mse_loss"}, "mse_loss"),
    "33": ({"div"}, "torch.sqrt"),
    "35": ({"log"}, "torch.log"),
    "39": ({"mul"}, "h * h"),
    "42": (set(), ""),
    "45": ({"arrived"}, "x * self.g"),
    "47": ({"arrived"}, 'float("inf")'),
    "49": ({"div"}, "mask.sum()"),
}


class Row(NamedTuple):
    """One script's result; ``right`` by column, None where a column does not apply."""

    name: str
    right: dict[str, bool | None]
    said: str
    seconds: float


def faulty(corpus: Path, only: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Scripts with something nonfinite to replay, and what is expected of them."""
    scripts = json.loads((corpus / "expected.json").read_text())["scripts"]
    for name, one in sorted(scripts.items()):
        if name[:2] in BORN and (not only or name.startswith(only)):
            yield name, one["expected"]


def clean(corpus: Path, only: tuple[str, ...]) -> list[str]:
    """Healthy scripts."""
    scripts = json.loads((corpus / "expected.json").read_text())["scripts"]
    return [n for n, one in sorted(scripts.items()) if one["kind"] == "clean" and (not only or n.startswith(only))]


def sentinel(
    words: Sequence[str], cwd: Path, options: dict[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of ours; one thread a rank."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "PET_"))}
    env = {**kept, "OMP_NUM_THREADS": "1"}
    if options:
        env["SENTINEL_AGENT_OPTIONS"] = json.dumps(options)
    return subprocess.run(
        [*SENTINEL, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )


def replayed(corpus: Path, name: str, options: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Run a script under the launcher and replay its first bundle; None if there is no bundle or no record."""
    with tempfile.TemporaryDirectory(prefix="sentinel-replay-accuracy-") as folder:
        place = Path(folder)
        script = place / f"s{name[:2]}.py"
        shutil.copy(corpus / f"{name}.py", script)
        flags = ["--sentinel-run-dir", "run", "--standalone", "--nproc-per-node", "2", script.name]
        sentinel(["run", *flags], place, options)
        bundles = sorted((place / "run" / "bundles").glob("a0-*"))
        if not bundles:
            return None
        ran = sentinel(["replay", str(bundles[0]), "-o", "json"], place)
    try:
        record: dict[str, Any] = json.loads(ran.stdout)
    except ValueError:
        return None
    return record


def judge(name: str, expected: dict[str, Any], record: dict[str, Any] | None) -> dict[str, bool | None]:
    """Right or wrong, by column."""
    if record is None:
        return dict.fromkeys(COLUMNS, False)
    ops, code = BORN[name[:2]]
    op = record["first_bad_op"] or {}
    if not ops:
        born: bool | None = not op
        line = born
    else:
        born = re.sub(r"^\w+\.|\.\w+$", "", op.get("op", "")) in ops
        line = code in (op.get("code") or "")
    cell = record["precision"]["fp32"]
    wanted = expected["fp32_replay_finite"]
    whole = cell != "damaged_state" and wanted is not None
    return {
        "op": born,
        "line": line,
        "cause": record["cause"] == expected["cause"],
        "fp32": (cell == ("finite" if wanted else "nonfinite")) if whole else None,
        "bits": _same_bits(record, expected),
    }


def _same_bits(record: dict[str, Any], expected: dict[str, Any]) -> bool | None:
    compared = [one for trial in record["trials"][:2] for one in trial["gradients"]]
    if not compared or not expected["same_precision_replay_reproduces"]:
        return None
    return all(one["different"] == 0 for one in compared)


def row(corpus: Path, name: str, expected: dict[str, Any]) -> Row:
    """Run, replay and judge one faulty script."""
    began = time.monotonic()
    record = replayed(corpus, name)
    return Row(name, judge(name, expected, record), _said(record), time.monotonic() - began)


def quiet(corpus: Path, name: str) -> Row:
    """A clean script whose bundle is written although nothing happened: nothing may be blamed."""
    began = time.monotonic()
    record = replayed(corpus, name, {"dump_round": FORCED_ROUND})
    blamed = record is None or record["reproduced"] or record["first_bad_op"] is not None
    return Row(name, {"quiet": not blamed}, _said(record), time.monotonic() - began)


def _said(record: dict[str, Any] | None) -> str:
    if record is None:
        return "no bundle, or no record"
    op = record["first_bad_op"] or {}
    return f"{op.get('op', '-')} {op.get('line', '-')} {record['cause']}: {record['reason'][:90]}"


def show(one: Row) -> str:
    """One line of the scoreboard."""
    cells = {True: "right", False: "WRONG", None: "-"}
    return (
        f"{one.name:34}"
        + "".join(f"{k} {cells[v]:6} " for k, v in one.right.items())
        + f" {one.seconds:5.1f} s  {one.said}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--corpus", type=Path, default=CORPUS, help="scripts and expected.json (default: the project's)"
    )
    parser.add_argument("--only", default="", metavar="01,03", help="only scripts whose names begin with one of these")
    parser.add_argument("--jobs", type=int, default=2, help="scripts at a time")
    chosen = parser.parse_args(argv)
    only = tuple(filter(None, chosen.only.split(",")))
    with ThreadPoolExecutor(max(chosen.jobs, 1)) as pool:
        wanted = list(faulty(chosen.corpus, only))
        running = [pool.submit(row, chosen.corpus, name, expected) for name, expected in wanted]
        running += [pool.submit(quiet, chosen.corpus, name) for name in clean(chosen.corpus, only)]
        rows = []
        for one in running:
            rows.append(one.result())
            print(show(rows[-1]), flush=True)
    return report(rows)


def report(rows: Sequence[Row]) -> int:
    """Print the sums; 0 if the bar is met."""
    wrong = {column: sum(one.right.get(column) is False for one in rows) for column in (*COLUMNS, "quiet")}
    counted = {column: sum(one.right.get(column) is not None for one in rows) for column in wrong}
    print("\n" + "  ".join(f"{column} {counted[column] - wrong[column]} of {counted[column]}" for column in wrong))
    return 0 if rows and all(wrong[column] <= BAR.get(column, 0) for column in wrong) else 1


if __name__ == "__main__":
    sys.exit(main())
