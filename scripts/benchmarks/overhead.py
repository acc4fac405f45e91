"""The agent's price per round: on and off interleaved in one run, with an on/on control and the read floor beside it.

Model of about 10 M parameters, DDP over gloo, checks before and after every all-reduce. Prints the agent's own processor time per
round against that of two plain reads of the gradients, and the paired step ratio with its interval; a ratio that the control's
interval covers is called not separable.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT = 1.5  # own time over two plain reads of the gradients


def parent(rounds: int, ranks: int) -> int:
    """Start this file under the launcher, timers on, and print what rank 0 measured."""
    with tempfile.TemporaryDirectory(prefix="sentinel-bench-") as folder:
        out = Path(folder) / "figures.json"
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "BENCH_OUT": str(out),
            "SENTINEL_AGENT_OPTIONS": '{"timers": true}',
        }
        command = [str(Path(sys.executable).parent / "sentinel"), "run", "--sentinel-quiet"]
        command += ["--sentinel-run-dir", f"{folder}/run", "--nproc-per-node", str(ranks), "--master-port", "29871"]
        done = subprocess.run([*command, __file__, "--rounds", str(rounds)], env=env, check=False)
        if done.returncode != 0 or not out.exists():
            print(f"the benchmark's ranks failed with exit code {done.returncode}", file=sys.stderr)
            return 1
        return report(json.loads(out.read_text()))


def report(figures: dict[str, list[float]]) -> int:
    """Print the table; exit code 1 if the agent's own time is over the limit."""
    own, floor = statistics.median(figures["own"]), statistics.median(figures["floor"])
    ratio = statistics.median(o / (2 * f) for o, f in zip(figures["own"], figures["floor"], strict=True))
    on_off, control = interval(figures["on"], figures["off"]), interval(figures["on"], figures["control"])
    separable = not control[1] <= on_off[0] <= control[2]
    print(f"rounds                     {len(figures['on'])} of each arm, interleaved in random order, medians")
    print(f"one read of the gradients  {floor * 1e3:.2f} ms")
    print(f"agent's own time           {own * 1e3:.2f} ms a round = {ratio:.2f} x two plain reads (limit {LIMIT})")
    print(f"round, agent off           {statistics.median(figures['off']) * 1e3:.1f} ms")
    print(f"round, agent on            {statistics.median(figures['on']) * 1e3:.1f} ms")
    print(
        f"paired ratio on/off        {on_off[0]:.3f} [{on_off[1]:.3f}, {on_off[2]:.3f}] (95 % of the median, bootstrap)"
    )
    print(f"control ratio on/on        {control[0]:.3f} [{control[1]:.3f}, {control[2]:.3f}]")
    print("verdict                    " + ("separable from noise" if separable else "not separable from noise"))
    return 0 if ratio <= LIMIT else 1


def interval(one: list[float], other: list[float]) -> tuple[float, float, float]:
    """Median of the paired ratios with its 95 % bootstrap interval (2,000 resamples, seed 0)."""
    pairs = [a / b for a, b in zip(one, other, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return statistics.median(pairs), medians[50], medians[1949]


def worker(rounds: int) -> None:
    """One rank: the same model and batches, the agent switched on and off between rounds."""
    import time

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from sentinel_agent import process

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = 1280
    model = DistributedDataParallel(
        nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU()))), bucket_cap_mb=5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(16, width)
    agent = process.current()
    assert agent is not None, "run me under sentinel run"
    watch = agent.health.stopwatch
    gradients = [p.grad for p in model.parameters()]

    def one_round(active: bool) -> tuple[float, float]:
        agent.health.active = active
        dist.barrier()
        own, began = watch.seconds, time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        took = time.perf_counter() - began
        return took, watch.seconds - own

    def read_floor() -> float:
        gradients = [p.grad.view(torch.int64) if p.grad.numel() % 2 == 0 else p.grad for p in model.parameters()]
        began = time.thread_time()
        for gradient in gradients:
            gradient.sum()
        return time.thread_time() - began

    for _ in range(5):
        one_round(True)
    figures: dict[str, list[float]] = {"on": [], "off": [], "control": [], "own": [], "floor": []}
    order = random.Random(0)
    for number in range(rounds):
        arms = ["on", "off", "control"]
        order.shuffle(arms)
        for arm in arms:
            took, own = one_round(arm != "off")
            figures[arm].append(took)
            if arm == "on":
                figures["own"].append(own)
                figures["floor"].append(read_floor())
        if dist.get_rank() == 0 and sys.stderr.isatty():
            print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    agent.health.active = True
    if dist.get_rank() == 0:
        Path(os.environ["BENCH_OUT"]).write_text(json.dumps(figures))
    del gradients
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=200, help="rounds of each arm (on, off, on again)")
    arguments.add_argument("--ranks", type=int, default=2)
    chosen = arguments.parse_args()
    if "RANK" in os.environ:
        worker(chosen.rounds)
    else:
        sys.exit(parent(chosen.rounds, chosen.ranks))
