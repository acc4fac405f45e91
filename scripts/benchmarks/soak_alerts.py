"""Healthy training for minutes under a real Prometheus and Alertmanager: what fires, and what is ever pending.

usage: scripts/soak-alerts [MINUTES]      (exit 1 if anything fired; needs the packages prometheus and prometheus-alertmanager)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from alerting import Monitoring, Webhook  # noqa: E402

TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=200)
rounds = int(float(sys.argv[1]) / 0.2)
for step in range(rounds):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(torch.randn(16, 64)).float() - 1).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    time.sleep(0.2)
dist.destroy_process_group()
"""


def main(minutes: float) -> int:
    """Train, watch, report; returns the exit code."""
    for program in ("prometheus", "prometheus-alertmanager"):
        if shutil.which(program) is None:
            print(f"sentinel: error: {program} is not installed\nhint: apt-get install {program}", file=sys.stderr)
            return 1
    with tempfile.TemporaryDirectory() as place:
        return _soak(Path(place), minutes)


def _soak(place: Path, minutes: float) -> int:
    webhook = Webhook()
    monitoring = Monitoring(place / "monitoring", webhook)
    monitoring.start()
    script = place / "train.py"
    script.write_text(TRAIN)
    seen: Counter[tuple[str, str]] = Counter()
    scrapes = 0
    try:
        training = _train(place, monitoring, script, minutes)
        while training.poll() is None:
            seen.update((a["labels"]["alertname"], a["state"]) for a in monitoring.alerts())
            time.sleep(1)
        time.sleep(15)  # the end of the run is the last thing that could alarm
        scrapes = int(float(monitoring.query("sum(count_over_time(up[1h]))")[0]["value"][1]))
    finally:
        monitoring.close()
        webhook.close()
    fired = len(webhook.received) + sum(count for (_, state), count in seen.items() if state == "firing")
    print(
        f"{minutes:g} min of healthy training, {scrapes} scrapes, {fired} alerts fired; pending at times: {dict(seen) or 'none'}"
    )
    return 1 if fired or training.returncode else 0


def _train(place: Path, monitoring: Monitoring, script: Path, minutes: float) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "sentinel.cli.main",
        "run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--sentinel-quiet",
    ]
    command += ["--sentinel-run-dir", str(place / "run"), "--sentinel-targets-dir", str(monitoring.targets)]
    return subprocess.Popen([*command, str(script), str(60 * minutes)], env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0))
