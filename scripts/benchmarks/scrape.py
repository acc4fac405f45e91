"""A scrape of /metrics and the first view of a run's page at 16,384 ranks, over real HTTP.

usage: scripts/bench scrape [--ranks N]      (exit 1 if a figure is over its bound)
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from relay_client import RelayClient  # noqa: E402
from training_story import TrainingStory, send  # noqa: E402

from sentinel.coordinator.app import Coordinator  # noqa: E402
from sentinel.coordinator.config import CoordinatorSettings  # noqa: E402

ROUNDS = 24
REPEATS = 21
MAX_SCRAPE_MS, MAX_SERIES, MAX_VIEW_MS, MAX_VIEW_KB = 50.0, 500, 1000.0, 300.0
VIEW = ("/run?id=bench", "/api/v1/rounds?run_id=bench&last=160&blocks=64", "/api/v1/status?ranks=false")
FILES = ("sentinel.css", "icon.svg", "run.js", "live.js", "curves.js", "heatmap.js")


def main() -> int:
    """Measure and compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16_384)
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as place, Coordinator(CoordinatorSettings(run_dir=Path(place))) as coordinator:
        _fill(coordinator, ranks)
        return _measure(str(coordinator.http_url), ranks)


def _fill(coordinator: Coordinator, ranks: int) -> None:
    story = TrainingStory(ranks, {ROUNDS - 4: ranks // 3})
    relay = RelayClient(coordinator.join, "bench", world_size=ranks)
    send(relay, story.hellos())
    for number in range(ROUNDS):
        send(relay, story.round(number))
    deadline = time.monotonic() + 300
    while not (runs := coordinator.status(False)) or runs[0].rounds_checked < ROUNDS:
        if time.monotonic() > deadline:
            raise SystemExit("sentinel: error: the coordinator did not take in the rounds\nhint: is the machine busy?")
        time.sleep(0.2)
    relay.close()


def _measure(url: str, ranks: int) -> int:
    scrapes = [_fetch(f"{url}/metrics") for _ in range(REPEATS)]
    took = sorted(ms for ms, _ in scrapes)
    series = len(re.findall(rb'^sentinel_\w+{[^}]*job_id="bench"', scrapes[-1][1], re.MULTILINE))
    views = [[_fetch(url + path) for path in (*VIEW, *(f"/static/{name}" for name in FILES))] for _ in range(5)]
    view_ms = statistics.median(sum(ms for ms, _ in parts) for parts in views)
    view_kb = sum(len(body) for _, body in views[-1]) / 1000
    print(
        f"{ranks} ranks: /metrics median {took[REPEATS // 2]:.1f} ms, worst {took[-1]:.1f} ms, {series} series of the run"
    )
    print(f"first view of the run's page: {view_ms:.0f} ms, {view_kb:.0f} kB in {len(VIEW) + len(FILES)} requests")
    good = (
        took[REPEATS // 2] <= MAX_SCRAPE_MS
        and series <= MAX_SERIES
        and view_ms <= MAX_VIEW_MS
        and view_kb <= MAX_VIEW_KB
    )
    return 0 if good else 1


def _fetch(url: str) -> tuple[float, bytes]:
    started = time.perf_counter()
    with urllib.request.urlopen(url, timeout=30) as answer:
        body = bytes(answer.read())
    return 1000 * (time.perf_counter() - started), body


if __name__ == "__main__":
    sys.exit(main())
