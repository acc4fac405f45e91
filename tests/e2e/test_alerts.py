"""From a NaN in a real training to a notification: real Prometheus, real Alertmanager, our rules, routes and target files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from alerting import GROUP_WAIT_SECONDS, INTERVAL_SECONDS, Monitoring, Webhook, need, poll

from sentinel.coordinator.store import IncidentReader

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
RUN_SECONDS = 120
HEALTHY_SECONDS = 5.0  # of scrapes after the skips were seen
Train = Callable[[Path], subprocess.Popen[str]]
ALLOWED_SECONDS = 2 * INTERVAL_SECONDS + GROUP_WAIT_SECONDS + 2.0  # scrape, evaluation, group_wait, and 2 s


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    """Where notifications arrive."""
    receiver = Webhook()
    yield receiver
    receiver.close()


@pytest.fixture
def monitoring(tmp_path: Path, webhook: Webhook, request: pytest.FixtureRequest) -> Iterator[Monitoring]:
    """A started Prometheus and Alertmanager; a test's parameter shortens the alerts' waiting times."""
    need("prometheus", "prometheus-alertmanager")
    started = Monitoring(tmp_path / "monitoring", webhook, wait=getattr(request, "param", None))
    started.start()
    yield started
    started.close()


@pytest.fixture
def train(monitoring: Monitoring, tmp_path: Path) -> Iterator[Train]:
    """Starts trainings of two ranks that tell Prometheus of themselves, and kills what is left at the end."""
    trainings: list[subprocess.Popen[str]] = []

    def start(script: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "sentinel.cli.main", "run", "--standalone", "--nproc-per-node", "2"]
        command += ["--sentinel-run-dir", str(tmp_path / "run"), "--sentinel-targets-dir", str(monitoring.targets)]
        with (tmp_path / "said").open("w") as said:
            training = subprocess.Popen(
                [*command, str(script)], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=said, stderr=said
            )
        trainings.append(training)
        return training

    yield start
    for training in trainings:
        training.kill()
        training.wait(20)


def finish(training: subprocess.Popen[str], tmp_path: Path) -> None:
    """Wait until a training has ended, and well."""
    assert training.wait(RUN_SECONDS) == 0, (tmp_path / "said").read_text()


def test_a_run_of_seconds_is_told_too(monitoring: Monitoring, webhook: Webhook, train: Train, tmp_path: Path) -> None:
    """A training that dies of its NaN before Prometheus was ever there is kept as a target until its incident was seen."""
    script = tmp_path / "short.py"
    script.write_text(SHORT)
    training = train(script)
    finish(training, tmp_path)
    poll(lambda: webhook.firing("SentinelIncidentCritical"), 10, "a notification")
    assert not list(monitoring.targets.iterdir()), "a run that is over is no target"


def test_a_nan_reaches_the_webhook_in_time(
    monitoring: Monitoring, webhook: Webhook, train: Train, tmp_path: Path
) -> None:
    """The page for a planted NaN comes within scrape + evaluation + group_wait + 2 s, and says which rank and step."""
    script = tmp_path / "one_gradient.py"
    script.write_text(ONE_GRADIENT)
    training = train(script)
    poll(lambda: webhook.firing("SentinelIncidentCritical"), RUN_SECONDS, "a notification")
    (tmp_path / "enough").touch()
    finish(training, tmp_path)
    at, path, alert = webhook.firing("SentinelIncidentCritical")[0]
    with IncidentReader(tmp_path / "run") as reader:
        opened = reader.incidents()[0].opened_at
    assert path == "/pager"
    assert alert["labels"]["kind"] == "nonfinite_gradient"
    assert alert["labels"]["severity"] == "critical"
    assert "Step 7, ranks 1 (rank_local, pre_reduce)" in alert["annotations"]["description"]
    assert at - opened.timestamp() <= ALLOWED_SECONDS, datetime.fromtimestamp(at)
    assert not list(monitoring.targets.iterdir()), "a run that is over is no target"


def test_a_healthy_run_alerts_nobody(monitoring: Monitoring, webhook: Webhook, train: Train, tmp_path: Path) -> None:
    """A training with a settling GradScaler is scraped and nothing fires (the ten-minute form is scripts/soak-alerts)."""
    script = tmp_path / "settling.py"
    script.write_text(SETTLING)
    training = train(script)
    poll(lambda: monitoring.query("sentinel_benign_skips_total > 0"), RUN_SECONDS, "skips in Prometheus")
    seen_until = time.monotonic() + HEALTHY_SECONDS
    while time.monotonic() < seen_until:
        assert not [alert for alert in monitoring.alerts() if not is_ending(alert)]
        time.sleep(0.5)
    assert training.poll() is None
    (tmp_path / "enough").touch()
    finish(training, tmp_path)
    poll(lambda: not monitoring.alerts(), 30, "Prometheus forgets the target")
    assert not webhook.received


def is_ending(alert: dict[str, Any]) -> bool:
    """True for a coordinator that is away but not yet for a minute: Prometheus takes seconds to drop a target."""
    return bool(alert["labels"]["alertname"] == "SentinelCoordinatorDown" and alert["state"] == "pending")


@pytest.mark.parametrize("monitoring", ["2s"], indirect=True)
def test_a_killed_coordinator_is_told_and_holds_back_the_rest(
    monitoring: Monitoring, webhook: Webhook, train: Train, tmp_path: Path
) -> None:
    """CoordinatorDown pages, and a warning of the same instance that is still kept is inhibited by it."""
    script = tmp_path / "loss_only.py"
    script.write_text(LOSS_ONLY)
    training = train(script)
    poll(lambda: webhook.firing("SentinelIncidentWarning"), RUN_SECONDS, "the warning")
    training.kill()
    [(_, path, _)] = poll(lambda: webhook.firing("SentinelCoordinatorDown"), 30, "CoordinatorDown")
    assert path == "/pager"
    poll(lambda: monitoring.inhibited().get("SentinelIncidentWarning"), 20, "the warning is inhibited")
    assert monitoring.inhibited()["SentinelCoordinatorDown"] is False


# A loss that is NaN in one round on one rank while every gradient is finite, then rounds without end.
LOSS_ONLY = """
import os
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
launcher, step = os.getppid(), 0
while os.getppid() == launcher:  # nobody else ends it once its launcher was killed
    step += 1
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    if step == 5 and dist.get_rank() == 1:
        loss = loss + (loss.detach() * float("nan"))
    loss.backward()
    optimizer.step()
    time.sleep(0.5)
"""


# A NaN sample in round 7 of rank 1, a step that is then left out, and rounds until the file `enough` lies beside the
# script: Prometheus pulls, so a run that ended between the incident and the next scrape would notify nobody.
ONE_GRADIENT = """
import time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
step, go_on = -1, torch.ones(())
while go_on:
    step += 1
    optimizer.zero_grad()
    sample = torch.ones(2, 4)
    if step == 7 and dist.get_rank() == 1:
        sample[0] = float("nan")
    model(sample).square().mean().backward()
    if all(p.grad.isfinite().all() for p in model.parameters()):
        optimizer.step()
    time.sleep(0.1)
    go_on = torch.tensor(float(not Path(__file__).with_name("enough").exists()))
    dist.broadcast(go_on, 0)
dist.destroy_process_group()
"""


# A NaN sample in round 7 of rank 1, and two rounds more: all is over about when Prometheus finds the run.
SHORT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(10):
    optimizer.zero_grad()
    sample = torch.ones(2, 4)
    if step == 7 and dist.get_rank() == 1:
        sample[0] = float("nan")
    model(sample).square().mean().backward()
    if all(p.grad.isfinite().all() for p in model.parameters()):
        optimizer.step()
dist.destroy_process_group()
"""


# A loss scale that starts too high for fp16 and settles, then rounds until the file `enough` lies beside the script.
SETTLING = """
import time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
go_on = torch.ones(())
while go_on:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(torch.ones(2, 4))
    loss = (predicted.float() - 1).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    time.sleep(0.1)
    go_on = torch.tensor(float(not Path(__file__).with_name("enough").exists()))
    dist.broadcast(go_on, 0)
dist.destroy_process_group()
"""
