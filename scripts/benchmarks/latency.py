"""How long after the bad backward the incident is there: rank 1 of two makes a NaN, and `sentinel incidents ls` is asked.

The training goes on at an ordinary pace meanwhile, so that nothing but the reports' own way counts: check, channel, relay, CURVE,
verdict, disk. The command's own start comes on top and is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from sentinel.coordinator.schema import StoreUnreadable
from sentinel.coordinator.store import IncidentReader

LIMIT_SECONDS = 1.0  # from the bad backward to the end of `sentinel incidents ls`
SENTINEL = (sys.executable, "-m", "sentinel.cli.main")
BAD_STEP, STEPS, STEP_SECONDS = 10, 40, 0.05
GIVE_UP_SECONDS = 60.0


class Taken(NamedTuple):
    """Seconds since the bad backward ended: until the incident could be read, and until the command had printed it."""

    readable: float
    printed: float


def measure() -> Taken:
    """One training. Raises RuntimeError if no incident was found."""
    with tempfile.TemporaryDirectory(prefix="sentinel-bench-") as folder:
        run_dir, bad = Path(folder, "run"), Path(folder, "bad")
        command = [*SENTINEL, "run", "--sentinel-quiet", "--sentinel-run-dir", str(run_dir), "--standalone"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_OUT": str(bad)}
        words = [*command, "--nproc-per-node", "2", __file__]
        with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as training:
            try:
                return _watch(run_dir, bad, time.monotonic() + GIVE_UP_SECONDS)
            finally:
                training.wait(GIVE_UP_SECONDS)


def _watch(run_dir: Path, bad: Path, until: float) -> Taken:
    while not _is_there(run_dir):
        if time.monotonic() > until:
            raise RuntimeError("no incident was found")
        time.sleep(0.002)
    readable = time.time()
    words = [*SENTINEL, "incidents", "ls", "--run-dir", str(run_dir), "-o", "json", "--exit-zero"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True)
    printed, began = time.time(), float(bad.read_text())
    (incident,) = json.loads(listed.stdout)["incidents"]
    if (incident["step"], incident["suspect_ranks"]) != (BAD_STEP, [1]):
        raise RuntimeError(f"another incident was found: {incident['reason']}")
    return Taken(readable - began, printed - began)


def _is_there(run_dir: Path) -> bool:
    if not (run_dir / "sentinel.db").exists():
        return False
    try:
        with IncidentReader(run_dir) as reader:
            return any(reader.incidents(run.run_id) for run in reader.runs())
    except StoreUnreadable:
        return False  # not whole yet


def worker() -> None:
    """One rank: a small model at an ordinary pace."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        bad = step == BAD_STEP and dist.get_rank() == 1
        optimizer.zero_grad()
        model(torch.full((8, 512), float("nan")) if bad else torch.randn(8, 512)).square().mean().backward()
        if bad:
            Path(os.environ["BENCH_OUT"]).write_text(repr(time.time()))
        optimizer.step()
        time.sleep(STEP_SECONDS)
    dist.destroy_process_group()


def main() -> int:
    """Print the figures; exit code 1 if the slowest is over the limit."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--times", type=int, default=10, help="trainings")
    taken = [measure() for _ in range(arguments.parse_args().times)]
    for what, seconds in (("readable", [t.readable for t in taken]), ("printed", [t.printed for t in taken])):
        print(f"{what:9} {statistics.median(seconds) * 1e3:4.0f} ms median, {max(seconds) * 1e3:4.0f} ms at most")
    slowest = max(t.printed for t in taken)
    kept = "kept" if slowest <= LIMIT_SECONDS else "NOT KEPT"
    print(f"{len(taken)} trainings; at most {LIMIT_SECONDS:g} s until it is printed: {kept}")
    return 0 if slowest <= LIMIT_SECONDS else 1


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker()
    else:
        sys.exit(main())
