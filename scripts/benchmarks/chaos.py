"""Dumps under violence: a rank is killed or frozen in the middle of writing its part, the coordinator is killed, the disk is
full, the link to another node carries 1 Mbit/s or breaks.

usage: scripts/bench chaos [--times N] [--seed S] [CASE...]      cases: kill, freeze, coordinator, full, readonly, link

After each run: it ended within its deadline; whatever is listed in a manifest verifies byte by byte; no part is there that is not
whole; and the ranks said to be missing are those without a whole part. Needs root for `full` and `readonly` (they mount a small
file system). Exits 1 if anything was wrong, and prints the seed to repeat it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sentinel.bundle.manifest import PartHeader
from sentinel.bundle.reader import Bundle, BundleRefused
from sentinel.bundle.verify import verify

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from launch_job import free_port
from slow_link import SlowLink

SENTINEL = (sys.executable, "-m", "sentinel.cli.main")
RANKS, FAULT = 3, 3
RUN_SECONDS = 90.0  # of one run, frozen rank included
MANIFEST_BYTES = 64 << 10  # a disk with less left may hold every part, and no manifest
FROZEN_SECONDS = 30.0  # a bundle is given up as partial well before

# A part of 60 MB, so that there is a middle to be hit; every rank writes its own before the step.
TRAIN = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
width = int(os.environ.get("WIDTH", 1280))
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(9))))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(6):
    optimizer.zero_grad()
    rows = torch.ones(2, width)
    if step == 3 and dist.get_rank() == 1:
        rows[0] = float("nan")
    model(rows).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@dataclass
class Run:
    """One run under violence: where, what is done to it, and what was found wrong afterwards."""

    folder: Path
    draw: random.Random
    wrong: list[str] = field(default_factory=list)
    hit: bool = False  # the violence came in the middle of a part

    @property
    def run_dir(self) -> Path:
        """The launcher's run directory."""
        return self.folder / "run"

    @property
    def bundle(self) -> Path:
        """The bundle of the faulty round."""
        return self.run_dir / "bundles" / f"a0-r{FAULT:06d}"


def train(run: Run, *more: str, meddle: Callable[[subprocess.Popen[bytes]], None]) -> int | None:
    """Train with ``meddle`` beside it. Returns the launcher's exit code, None if it had to be killed at its deadline."""
    script = run.folder / "train.py"
    script.write_text(TRAIN)
    words = ["run", "--standalone", "--nproc-per-node", str(RANKS), "--sentinel-run-dir", str(run.run_dir), *more]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "PET_"))} | {"OMP_NUM_THREADS": "1"}
    with (run.folder / "said").open("wb") as said:
        launcher = subprocess.Popen([*SENTINEL, *words, str(script)], env=env, stdout=said, stderr=said)
    meddling = threading.Thread(target=meddle, args=(launcher,))
    meddling.start()
    try:
        return launcher.wait(RUN_SECONDS)
    except subprocess.TimeoutExpired:
        run.wrong.append(f"still running after {RUN_SECONDS:.0f} s")
        launcher.terminate()
        return None
    finally:
        meddling.join()
        with contextlib.suppress(ProcessLookupError):
            launcher.kill()


def writer_of(run: Run, rank: int, until: float) -> int | None:
    """Process id of ``rank`` while it writes its part; None if that was not seen in time."""
    pattern = f".rank-{rank:05d}.tmp-*"
    while time.monotonic() < until:
        for tmp in run.bundle.glob(pattern):
            return int(tmp.name.rpartition("-")[2])
        time.sleep(0.001)
    return None


def strike(run: Run, rank: int, number: signal.Signals, launcher: subprocess.Popen[bytes]) -> int | None:
    """Send a signal to ``rank`` at a random moment of its writing. Returns its process id if that hit."""
    pid = writer_of(run, rank, time.monotonic() + RUN_SECONDS / 2)
    if pid is None or launcher.poll() is not None:
        return None
    time.sleep(run.draw.uniform(0.0, 0.06))
    run.hit = bool(list(run.bundle.glob(f".rank-{rank:05d}.tmp-*")))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return pid
    return None


def kill(run: Run) -> None:
    """A rank dies in the middle of its part: the launcher ends the others, and what is whole is committed."""
    rank = run.draw.randrange(RANKS)
    train(run, meddle=lambda launcher: void(strike(run, rank, signal.SIGKILL, launcher)))
    check(run, hurt=rank)


def freeze(run: Run) -> None:
    """A rank is stopped in the middle of its part and goes on later: the bundle is committed without it, and again with it."""
    rank = run.draw.randrange(RANKS)
    partial: list[tuple[int, ...]] = []

    def meddle(launcher: subprocess.Popen[bytes]) -> None:
        pid = strike(run, rank, signal.SIGSTOP, launcher)
        if pid is None:
            return
        deadline = time.monotonic() + FROZEN_SECONDS
        while time.monotonic() < deadline and not partial:
            with contextlib.suppress(BundleRefused, OSError):
                if (manifest := Bundle.open(run.bundle).manifest) is not None:
                    partial.append(manifest.missing_ranks)
            time.sleep(0.1)
        os.kill(pid, signal.SIGCONT)

    code = train(run, meddle=meddle)
    if run.hit and partial not in ([], [(rank,)]):
        run.wrong.append(f"without rank {rank}, ranks {partial} were said to be missing")
    if run.hit and not partial:
        run.wrong.append(f"no manifest within {FROZEN_SECONDS:.0f} s of a frozen rank")
    if code != 0:
        run.wrong.append(f"training ended with {code} though its rank went on")
    check(run, hurt=None)


def coordinator(run: Run) -> None:
    """The coordinator is killed in the middle of a dump and started again: it takes up where it was and commits the bundle."""
    standing = run.folder / "standing"
    first = start_coordinator(standing)
    started: list[subprocess.Popen[bytes]] = []

    def meddle(_launcher: subprocess.Popen[bytes]) -> None:
        if writer_of(run, run.draw.randrange(RANKS), time.monotonic() + RUN_SECONDS / 2) is not None:
            time.sleep(run.draw.uniform(0.0, 0.1))
            run.hit = True
        first.kill()
        first.wait()
        started.append(start_coordinator(standing))

    code = train(run, "--sentinel-join", str(standing / "join.json"), meddle=meddle)
    if code != 0:
        run.wrong.append(f"training ended with {code}")
    deadline = time.monotonic() + 40.0
    while time.monotonic() < deadline and not (run.bundle / "manifest.json").exists():
        time.sleep(0.1)
    started[0].terminate()
    started[0].wait(20)
    check(run, hurt=None)


def start_coordinator(place: Path) -> subprocess.Popen[bytes]:
    """A standing coordinator at the same port each time; returns once it listens."""
    place.mkdir(exist_ok=True)
    join = place / "join.json"
    endpoint = json.loads(join.read_text())["endpoint"] if join.exists() else "tcp://127.0.0.1:0"
    join.unlink(missing_ok=True)
    words = ["coordinator", "--run-dir", str(place), "--bind", endpoint]
    said = (place / "said").open("ab")
    process = subprocess.Popen([*SENTINEL, *words], stdout=said, stderr=said)
    deadline = time.monotonic() + 30.0
    while not join.exists():
        assert process.poll() is None, (place / "said").read_text()
        assert time.monotonic() < deadline, "the coordinator did not start"
        time.sleep(0.02)
    return process


def full(run: Run) -> None:
    """Somebody fills the disk while the parts are written: what does not fit is an error of that rank, and training goes on."""
    small_disk(run, "size=500m")


def readonly(run: Run) -> None:
    """The place of the bundles is read-only: there is none, every rank says so, and training goes on."""
    small_disk(run, "ro,size=10m")


def small_disk(run: Run, options: str) -> None:
    """Train with the bundles' folder on a file system of its own."""
    bundles = run.run_dir / "bundles"
    bundles.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(bundles)], check=True)
    try:
        code = train(run, meddle=lambda _launcher: None if "ro" in options.split(",") else fill(run))
        run.hit = run.hit or "ro" in options.split(",")
        if code != 0:
            run.wrong.append(f"training ended with {code}")
        if "ro" in options.split(","):
            if list(bundles.iterdir()):
                run.wrong.append("something was written to a read-only place")
        else:
            check(run, hurt=None)
    finally:
        subprocess.run(["umount", str(bundles)], check=True)


def fill(run: Run) -> None:
    """Take all but a little of the disk away from whoever is writing a part."""
    if writer_of(run, run.draw.randrange(RANKS), time.monotonic() + RUN_SECONDS / 2) is None:
        return
    run.hit = True
    free = shutil.disk_usage(run.bundle).free
    with (run.bundle.parent / "filler").open("wb") as filler, contextlib.suppress(OSError):
        os.posix_fallocate(filler.fileno(), 0, max(free - run.draw.randrange(1, 40 << 20), 1))


# The launchers' patience with parts that are fetched, cut short: 60 MB take eight minutes.
HURRIED = (
    sys.executable,
    "-c",
    "from sentinel.launch import watch; watch.PARTS_SECONDS = 15.0\n"
    "from sentinel.cli.main import main; raise SystemExit(main())",
)


def link(run: Run) -> None:
    """Two ranks are on another node behind 1 Mbit/s, which may break: their parts come whole, or are said to be missing."""
    small, breaks = run.draw.random() < 0.5, run.draw.random() < 0.4
    script, there, began = run.folder / "train.py", run.folder / "there", time.monotonic()
    script.write_text(TRAIN)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "PET_"))} | {"OMP_NUM_THREADS": "1"}
    env["WIDTH"] = "64" if small else "1280"  # parts of 250 kB, or of 60 MB
    port = str(free_port())
    common = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]

    def launch(node: int, ranks: int, run_dir: Path, *own: str) -> subprocess.Popen[bytes]:
        words = [
            "run",
            *common,
            "--node-rank",
            str(node),
            "--nproc-per-node",
            str(ranks),
            "--sentinel-run-dir",
            str(run_dir),
        ]
        said = (run.folder / f"said{node}").open("wb")
        return subprocess.Popen([*HURRIED, *words, *own, str(script)], env=env, stdout=said, stderr=said)

    # torchrun wants as many ranks on each node
    launchers = [launch(0, 2, run.run_dir)]
    while not (run.run_dir / "join.json").exists():
        time.sleep(0.02)
    join = json.loads((run.run_dir / "join.json").read_text())
    slow = SlowLink(int(join["endpoint"].rpartition(":")[2]), bits=1e6)
    (run.folder / "slow.json").write_text(json.dumps({**join, "endpoint": f"tcp://127.0.0.1:{slow.own}"}))
    launchers.append(launch(1, 2, there, "--sentinel-join", str(run.folder / "slow.json")))
    far = there / "bundles" / run.bundle.name
    while not list(far.glob("rank-*")) and launchers[1].poll() is None:
        time.sleep(0.005)
    run.hit = launchers[1].poll() is None
    if breaks:
        time.sleep(run.draw.uniform(0.0, 4.0))
        slow.cut()
    for launcher in launchers:
        try:
            code = launcher.wait(max(began + RUN_SECONDS - time.monotonic(), 1.0))
            run.wrong += [f"training ended with {code}"] if code != 0 else []
        except subprocess.TimeoutExpired:
            run.wrong.append(f"still running after {RUN_SECONDS:.0f} s")
            launcher.kill()
    slow.close()
    check(run, hurt=None, ranks=4, smallest=10_000 if small else 50 << 20)
    if list(run.bundle.glob(".rank-*")):
        run.wrong.append("pieces of a part were left behind")
    if small and not breaks and (missing := Bundle.open(run.bundle).missing_ranks):
        run.wrong.append(f"small parts of ranks {missing} did not come")


def check(run: Run, hurt: int | None, *, ranks: int = RANKS, smallest: int = 50 << 20) -> None:
    """Nothing torn is taken for whole, and who is missing is said."""
    if not run.bundle.is_dir():
        run.wrong.append("there is no bundle")
        return
    whole = {rank for rank in range(ranks) if is_whole(run.bundle / f"rank-{rank:05d}", smallest)}
    torn = [path.name for path in run.bundle.glob("rank-*") if not is_whole(path, smallest)]
    if torn:
        run.wrong.append(f"torn parts under their final names: {torn}")
    try:
        manifest = Bundle.open(run.bundle).manifest
    except BundleRefused as refused:
        run.wrong.append(f"the bundle cannot be read: {refused}")
        return
    if manifest is None:
        if whole and shutil.disk_usage(run.bundle).free > MANIFEST_BYTES:
            run.wrong.append(f"no manifest, though parts of {sorted(whole)} are there")
        return
    missing = set(range(ranks)) - whole
    if set(manifest.missing_ranks) != missing or manifest.complete is not (not missing):
        run.wrong.append(f"missing are {sorted(missing)}, the manifest says {manifest.missing_ranks}")
    if run.hit and hurt is not None and hurt in whole and hurt in manifest.missing_ranks:
        run.wrong.append(f"rank {hurt} is whole and said to be missing")
    run.wrong += [f"does not verify: {problem}" for problem in verify(run.bundle)]


def is_whole(part: Path, smallest: int) -> bool:
    """A part under its final name has its header, and its parameters unless the header says why not."""
    try:
        header = PartHeader.model_validate_json((part / "part.json").read_text())
        return "left out" in header.reason or (part / "parameters.safetensors").stat().st_size > smallest
    except (OSError, ValueError):
        return False


def void(_value: object) -> None:
    """Nothing."""


CASES: dict[str, Callable[[Run], None]] = {
    "kill": kill,
    "freeze": freeze,
    "coordinator": coordinator,
    "full": full,
    "readonly": readonly,
    "link": link,
}


def runs(names: list[str], times: int, seed: int) -> Iterator[tuple[str, int, Run]]:
    """Every case ``times`` times, each with a draw of its own."""
    for name in names:
        for number in range(times):
            with tempfile.TemporaryDirectory(prefix="sentinel-chaos-") as folder:
                run = Run(Path(folder), random.Random(f"{seed} {name} {number}"))
                CASES[name](run)
                yield name, number, run


def main(names: list[str], times: int, seed: int) -> int:
    """Run all; returns the exit code."""
    print(f"seed {seed}, {times} times each: {', '.join(names)}")
    bad = 0
    hits: dict[str, int] = dict.fromkeys(names, 0)
    for name, number, run in runs(names, times, seed):
        hits[name] += run.hit
        bad += bool(run.wrong)
        where = "in the middle" if run.hit else "missed"
        print(f"{name:12s} {number + 1:3d}  {where}  {'; '.join(run.wrong) or 'right'}", flush=True)
    print(f"{bad} wrong of {times * len(names)}; hit in the middle: {hits}")
    return 1 if bad else 0


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    arguments.add_argument("--times", type=int, default=20)
    arguments.add_argument("--seed", type=int, default=0)
    chosen = arguments.parse_args()
    sys.exit(main(chosen.cases or list(CASES), chosen.times, chosen.seed))
