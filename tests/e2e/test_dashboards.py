"""Every query of every dashboard, asked of a real Prometheus that holds a real run's metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from alerting import Monitoring, Webhook, need, poll

from sentinel.coordinator.exports.dashboards import dashboards

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SECONDS = 100

# Mixed precision, poisoned batches, timers on, and rounds for as long as the launcher lives.
TRAINING = """
import os
import time
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
plain = DistributedDataParallel(torch.nn.Linear(16, 1))  # what a hook's reductions return is not looked at, and has no norm
optimizer = torch.optim.SGD([*model.parameters(), *plain.parameters()], lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
rows = torch.randn(2000, 16)
rows[16::30] = float("nan")  # again and again, so that an incident is open whenever it is asked for
loader = torch.utils.data.DataLoader(rows, batch_size=2)
launcher = os.getppid()
for step, batch in enumerate(loader):
    if os.getppid() != launcher:
        break
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        batch = torch.nan_to_num(batch)
    scaler.scale((model(batch) + plain(batch)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    time.sleep(0.3)
"""

# Empty in a run without that trouble: nothing is dropped or swallowed here.
EMPTY_WITHOUT_TROUBLE = {"Reports dropped", "Faults swallowed by agents"}


@pytest.fixture(scope="module")
def monitoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitoring]:
    """A Prometheus that has scraped a run with an incident for long enough that rates exist; the run goes on meanwhile."""
    need("prometheus", "prometheus-alertmanager")
    place = tmp_path_factory.mktemp("dashboards")
    webhook = Webhook()
    started = Monitoring(place / "monitoring", webhook)
    started.start()
    (place / "train.py").write_text(TRAINING)
    command = [sys.executable, "-m", "sentinel.cli.main", "run", "--standalone", "--nproc-per-node", "2"]
    command += ["--sentinel-run-dir", str(place / "run"), "--sentinel-targets-dir", str(started.targets)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "SENTINEL_AGENT_OPTIONS": json.dumps({"timers": True})}
    with (place / "said").open("w") as said:
        training = subprocess.Popen([*command, str(place / "train.py")], env=environ, stdout=said, stderr=said)
    try:
        poll(lambda: started.query("sum(sentinel_bundles_committed_total) > 0"), SECONDS, "a bundle in Prometheus")
        poll(lambda: started.query("job_id:sentinel_check_overhead:ratio5m >= 0"), SECONDS, "recordings of rates")
        poll(lambda: started.query("count_over_time(sentinel_step[5m]) > 5"), SECONDS, "several scrapes")
        yield started
    finally:
        training.kill()
        training.wait(20)
        started.close()
        webhook.close()


def queries() -> list[Any]:
    """Every query with its dashboard and panel."""
    return [
        pytest.param(panel["title"], target["expr"], id=f"{sheet['uid']}-{panel['title']}-{target['refId']}")
        for sheet in map(json.loads, dashboards().values())
        for panel in sheet["panels"]
        for target in panel.get("targets", ())
    ]


@pytest.mark.parametrize(("title", "expr"), queries())
def test_a_panel_shows_something(monitoring: Monitoring, title: str, expr: str) -> None:
    """The panel's query gives series on a real run's data, with the run chosen as a user would."""
    [known] = {s["metric"]["job_id"] for s in monitoring.query("sentinel_agents_expected")}
    query = expr.replace("$job_id", known)
    if title in EMPTY_WITHOUT_TROUBLE:
        assert isinstance(monitoring.query(query), list)
    else:
        poll(lambda: monitoring.query(query), 15, f"series of {query}")
