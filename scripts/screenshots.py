"""Screenshots of the coordinator's pages for the documents, of a story told to a real coordinator.

usage: scripts/screenshots.py [DIR]      (default: deploy/screenshots; needs chromium)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from playwright.sync_api import sync_playwright  # noqa: E402
from relay_client import RelayClient  # noqa: E402
from training_story import TrainingStory, send  # noqa: E402

from sentinel.coordinator.app import Coordinator  # noqa: E402
from sentinel.coordinator.config import CoordinatorSettings  # noqa: E402

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
]
SHOTS = {
    (1280, "light"): "wide-light",
    (1280, "dark"): "wide-dark",
    (400, "light"): "narrow-light",
    (400, "dark"): "narrow-dark",
}


# The story lies in a temporary folder; readers are shown a place like theirs.
SHOWN_PLACE = r"""() => { for (const part of document.querySelectorAll("[data-live]")) delete part.dataset.live;
  for (const code of document.querySelectorAll("pre code")) {
  code.textContent = code.textContent.replaceAll(/\/\S*(?=\/digits)/g, "/home/ada/runs"); } }"""


def main(folder: Path) -> None:
    """Tell the story, then take every page at both widths in both themes."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as place,
        Coordinator(CoordinatorSettings(run_dir=Path(place) / "coordinator")) as coordinator,
        sync_playwright() as playwright,
    ):
        _train(coordinator, Path(place))
        _tell(coordinator, "vit-b16-pretrain", TrainingStory(16, {104: 11}, started_at=time.time() - 60), 118)
        _tell(coordinator, "moe-16k", TrainingStory(16_384, {31: 5000}, started_at=time.time() - 60), 40)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for (width, theme), name in SHOTS.items():
            page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme).new_page()
            _shoot(page, coordinator, folder, name)
        browser.close()


def _train(coordinator: Coordinator, place: Path) -> None:
    """The demo's first scene, for an incident with a real bundle."""
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
    command += ["--sentinel-run-dir", str(place / "digits"), "--sentinel-run-id", "digits-segmentation"]
    command += ["--sentinel-join", str(coordinator.run_dir / "join.json"), "scripts/demo_scenes/segmentation.py"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=200)


def _tell(coordinator: Coordinator, run_id: str, story: TrainingStory, rounds: int) -> None:
    relay = RelayClient(coordinator.join, run_id, world_size=story.ranks, relay=run_id)
    send(relay, story.hellos())
    for number in range(rounds):
        send(relay, story.round(number))
    deadline = time.monotonic() + 200
    while not any(s.run_id == run_id and s.rounds_checked >= rounds for s in coordinator.status(False) or ()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    relay.close()


def _shoot(page: Any, coordinator: Coordinator, folder: Path, name: str) -> None:
    [incident] = coordinator.incidents("digits-segmentation")
    pages = {
        "overview": "/",
        "run": "/run?id=vit-b16-pretrain",
        "run-16384": "/run?id=moe-16k",
        "incident": f"/incident?id={incident.id}&run_id=digits-segmentation",
    }
    for what, path in pages.items():
        page.goto(f"{coordinator.http_url}{path}")
        page.wait_for_selector(
            "html[data-drawn]" if what.startswith("run") else "#link[data-state=live]", state="attached"
        )
        page.wait_for_selector("#link[data-state=live]")
        page.evaluate(SHOWN_PLACE)
        page.screenshot(path=folder / f"{what}-{name}.png", full_page=True, animations="disabled")
        print(f"{what}-{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "deploy" / "screenshots")
