"""The seed's example, told by running it: two faults, found and repaired one after the other, and what the repairs are worth.

usage: scripts/seed-example [--steps N] [--folder DIR]

Trains a segmentation network five times under `sentinel run`: as it stands, in float32 with the guard, with the first repair, with
both, and with both in float32. Prints what Sentinel, its replay and its lint said, and a table. Exits 1 if a promise was not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("train.py")
SENTINEL = (sys.executable, "-m", "sentinel.cli.main")
BOTH_REPAIRS = ("--eps", "1e-6", "--logits")
DIVISION, BCE = "return (images - mean) / (std + eps)", "sigmoid_bce"
HALTED = 93
MAX_DICE_POINTS = 0.3


@dataclass
class Run:
    """One training that has ended."""

    name: str
    exit_code: int
    seconds: float
    incidents: list[dict[str, Any]]
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def found(self) -> str:
        """The first incident in a few words."""
        if not self.incidents:
            return "nothing"
        first = self.incidents[0]
        return f"{first['kind']}, step {first['step']}, ranks {first['suspect_ranks']}"

    def figure(self, name: str, form: str = "g") -> str:
        """A figure of the table, '-' where the run came to none."""
        return format(self.figures[name], form) if name in self.figures else "-"


class Story:
    """The runs so far and the promises that were not kept."""

    def __init__(self, folder: Path, steps: int, breaks: int) -> None:
        self.runs: dict[str, Run] = {}
        self.broken: list[str] = []
        self._folder, self._steps, self._breaks = folder, steps, breaks
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "PET_"))} | {
            "OMP_NUM_THREADS": "1"
        }

    def expect(self, kept: bool, promise: str) -> None:
        """Say whether a promise was kept."""
        print(f"    {'kept' if kept else 'NOT KEPT'}: {promise}", flush=True)
        if not kept:
            self.broken.append(promise)

    def train(self, name: str, *words: str, flags: tuple[str, ...] = (), steps: int | None = None) -> Run:
        """Train under Sentinel; the script's own lines and Sentinel's are shown as they come."""
        run_dir, out = self._folder / name, self._folder / f"{name}.json"
        own = ("--standalone", "--nproc-per-node", "2", "--sentinel-run-dir", str(run_dir), *flags)
        arguments = ("--steps", str(steps or self._steps), "--breaks", str(self._breaks), "--out", str(out), *words)
        print(f"\n=== {name}: sentinel run {' '.join(flags)} {SCRIPT.name} {' '.join(words)}", flush=True)
        began = time.monotonic()
        with subprocess.Popen(
            [*SENTINEL, "run", *own, str(SCRIPT), *arguments],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(("step ", "Dice ", "sentinel: ", "  At step", "    who", "    seen", "    sample")):
                    print(f"    {line.rstrip()}", flush=True)
        listed = self.ask("incidents", "ls", "--run-dir", str(run_dir), "--exit-zero", "-o", "json")["incidents"]
        figures = json.loads(out.read_text()) if out.exists() else {}
        self.runs[name] = Run(name, process.returncode, time.monotonic() - began, listed, figures)
        return self.runs[name]

    def ask(self, *words: str) -> dict[str, Any]:
        """What a command of ``sentinel`` prints as JSON. Raises ValueError if it prints none."""
        done = subprocess.run([*SENTINEL, *words], env=self._env, stdout=subprocess.PIPE, text=True, check=False)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def replay(self, run: Run) -> dict[str, Any]:
        """Replay the bundle of a run's first incident."""
        bundle = self._folder / run.name / run.incidents[0]["bundle"]
        print(f"    $ sentinel replay {bundle.name}", flush=True)
        return self.ask("replay", str(bundle), "-o", "json")


def first_fault(story: Story) -> None:
    """The script as it stands dies of the flat scan; replay names the division and the sample, lint the loss as well."""
    run = story.train("as-it-stands")
    story.expect(run.exit_code == 1 and len(run.incidents) == 1, "the script dies of it, and there is one incident")
    if not run.incidents or not run.incidents[0]["bundle"]:
        story.expect(False, "the step of the fault was kept")
        return
    found = story.replay(run)
    bad = found["first_bad_op"] or {}
    print(f"    {found['cause']}: {found['reason']}", flush=True)
    story.expect(bad.get("code") == DIVISION, f"replay names the division: {bad.get('line')}  {bad.get('code')}")
    story.expect(len(found["samples"]) == 1, f"and the sample: {found['samples']} of the batch")
    flat = [one for one in found["batch"] if one["what"] == "constant" and one["samples"] == found["samples"]]
    story.expect(bool(flat), "which is the flat scan: one value only")
    rules = {(one["rule"], one["line"]) for one in story.ask("lint", "--format", "json", str(SCRIPT))["findings"]}
    lines = ", ".join(f"{rule} (line {line})" for rule, line in sorted(rules))
    story.expect(BCE in {rule for rule, _ in rules}, f"lint names BCELoss on probabilities: {lines}")


def halted(story: Story) -> None:
    """Float32 does not help, so that precision is not the cause; without a loss that refuses NaN the guard ends the training."""
    run = story.train("in-float32", "--logits", "--precision", "fp32", flags=("--sentinel-guard", "halt"))
    story.expect(
        run.exit_code == HALTED, f"the guard halts it before the step, on every rank: exit code {run.exit_code}"
    )
    same = run.found.partition(",")[2] == story.runs["as-it-stands"].found.partition(",")[2]
    story.expect(same, f"at the same step, on the same rank: {run.found}")


def second_fault(story: Story, steps: int) -> None:
    """With the first repair alone, a loss of probabilities meets a mask that is wrong where the network is sure."""
    run = story.train("first-repair", "--eps", "1e-6", steps=steps)
    skipped = run.figures.get("skipped", 0)
    story.expect(
        skipped > 1 and bool(run.incidents),
        f"the scale falls with each of {skipped:g} skips; Sentinel says {run.found}",
    )
    if run.incidents and run.incidents[0]["bundle"]:
        found = story.replay(run)
        bad = found["first_bad_op"] or {}
        print(f"    {found['cause']}: {found['reason']}", flush=True)
        story.expect(
            "BCELoss" in (bad.get("code") or ""), f"replay names the loss: {bad.get('line')}  {bad.get('code')}"
        )
        story.expect(found["precision"]["fp32"] == "finite", f"and that float32 is finite: {found['cause']}")


def repaired(story: Story) -> None:
    """With both repairs the script trains to its end without an incident, and as well as in float32."""
    for name, more in (("both-repairs", ()), ("float32", ("--precision", "fp32"))):
        run = story.train(name, *BOTH_REPAIRS, *more)
        story.expect(run.exit_code == 0 and not run.incidents, "no incident to the end")
    dice = [story.runs[name].figures.get("dice", 0.0) for name in ("both-repairs", "float32")]
    story.expect(
        abs(dice[0] - dice[1]) <= MAX_DICE_POINTS,
        f"Dice within {MAX_DICE_POINTS} points: {dice[0]:.2f} and {dice[1]:.2f}",
    )


def table(story: Story) -> None:
    """What came of each run."""
    print(
        f"\n{'RUN':14s} {'EXIT':>4s}  {'DICE %':>6s}  {'LOSS':>6s}  {'SKIPPED':>7s}  {'SCALE':>8s}  {'TIME':>6s}  SENTINEL SAID"
    )
    for run in story.runs.values():
        dice, loss, skipped = run.figure("dice", ".2f"), run.figure("loss", ".4f"), run.figure("skipped")
        cells = f"{dice:>6s}  {loss:>6s}  {skipped:>7s}  {run.figure('scale', '.3g'):>8s}  {run.seconds:5.0f}s"
        print(f"{run.name:14s} {run.exit_code:4d}  {cells}  {run.found}")


def main() -> int:
    """Tell the story; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="of the runs that come to their end")
    parser.add_argument(
        "--breaks", type=int, help="about the step at which the scan goes flat (default: 3000, or a third)"
    )
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: nowhere)")
    chosen = parser.parse_args()
    breaks = min(3000, chosen.steps // 3) if chosen.breaks is None else chosen.breaks
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sentinel-seed-") as temporary:
        story = Story(chosen.folder or Path(temporary), chosen.steps, breaks)
        first_fault(story)
        halted(story)
        second_fault(story, min(chosen.steps, breaks + 600))
        repaired(story)
        table(story)
    print(f"\n{len(story.broken)} promises not kept, {time.monotonic() - began:.0f} s in all, {chosen.steps} steps")
    return 1 if story.broken else 0


if __name__ == "__main__":
    sys.exit(main())
