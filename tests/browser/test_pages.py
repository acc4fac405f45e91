"""The pages in a real browser: live during a run, quiet, private, usable with keys, and finished at both widths in both themes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from relay_client import RelayClient, wait_until
from story import RUN, incident, write_database
from training_story import TrainingStory, send

from sentinel.coordinator.app import Coordinator
from sentinel.coordinator.config import CoordinatorSettings

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=alert(1)>"
FIRST_VIEW_SECONDS = 1.0
FIRST_VIEW_BYTES = 300_000
LIVE = "#link[data-state=live]"


@pytest.fixture
def tell(coordinator: Coordinator, request: pytest.FixtureRequest) -> Callable[..., RelayClient]:
    """Tells the coordinator a story's rounds, and waits until they are judged."""

    def told(run_id: str, story: TrainingStory, rounds: range) -> RelayClient:
        relay = RelayClient(
            coordinator.join, run_id, world_size=story.ranks, relay=f"relay-{rounds.start}-{story.ranks}"
        )
        request.addfinalizer(relay.close)
        send(relay, story.hellos())
        for number in rounds:
            send(relay, story.round(number))
        wait_until(lambda: judged(coordinator, run_id) >= rounds.stop, f"{rounds.stop} rounds judged")
        return relay

    return told


def judged(coordinator: Coordinator, run_id: str) -> int:
    """Rounds of a run that were judged so far."""
    return next((run.rounds_checked for run in coordinator.status(False) or () if run.run_id == run_id), 0)


def run_page(coordinator: Coordinator, run_id: str) -> str:
    """Address of a run's page."""
    return f"{coordinator.http_url}/run?id={run_id}"


def test_the_page_follows_a_run(coordinator: Coordinator, tell: Callable[..., RelayClient], visit: Any) -> None:
    """Rounds and an incident that come while the page is open appear on it, without a reload, and the incident opens."""
    story = TrainingStory(8, {25: 3})
    relay = tell("run", story, range(20))
    seen = visit(run_page(coordinator, "run"))
    page = seen.page
    page.wait_for_selector(LIVE)
    page.wait_for_selector("html[data-drawn='20']")
    assert "No incidents" in page.text_content("[data-live=verdict]")
    for number in range(20, 30):
        send(relay, story.round(number))
    page.wait_for_selector("html[data-drawn='30']")
    page.wait_for_selector(".verdict.critical")
    assert "first at step 25" in page.text_content("#heat-readout")
    page.click(".incident h3 a")
    page.wait_for_selector("h1:has-text('Nonfinite gradient at step 25')")
    assert page.text_content(".verdict strong") == "Rank 3"
    assert page.locator("tr.suspect").count() == 1
    seen.assert_well_behaved(coordinator.http_url)


def test_a_job_name_with_markup_stays_text(
    coordinator: Coordinator, tell: Callable[..., RelayClient], visit: Any
) -> None:
    """A run called after a script tag is shown as that text on every page, and nothing of it runs."""
    tell(HOSTILE, TrainingStory(2, {6: 1}), range(9))
    seen = visit(coordinator.http_url)
    seen.page.wait_for_selector(LIVE)
    assert seen.page.text_content("td .id") == HOSTILE
    seen.page.click("td .id")
    seen.page.wait_for_selector("html[data-drawn]")
    assert seen.page.text_content("h1") == HOSTILE
    seen.page.click(".incident h3 a")
    seen.page.wait_for_selector("tr.suspect")
    assert seen.page.title().endswith("· Sentinel")
    assert seen.page.locator("main img, main script").count() == 0
    seen.assert_well_behaved(coordinator.http_url)


def test_the_first_view_is_quick_and_small(
    coordinator: Coordinator, tell: Callable[..., RelayClient], visit: Any
) -> None:
    """At 16,384 ranks a run's page is drawn within a second of asking and takes less than 300 kB; a block of ranks opens."""
    tell("large", TrainingStory(16_384, {6: 9000}), range(9))
    seen = visit("about:blank")
    sizes: list[int] = []
    seen.page.on(
        "response", lambda response: sizes.append(len(response.body())) if "events" not in response.url else None
    )
    started = time.monotonic()
    seen.page.goto(run_page(coordinator, "large"), wait_until="commit")
    seen.page.wait_for_selector("html[data-drawn]")
    took = time.monotonic() - started
    assert sum(sizes) < FIRST_VIEW_BYTES
    assert took < FIRST_VIEW_SECONDS * (
        4 if os.environ.get("CI") else 2
    )  # the machine is shared; scripts/bench scrape is exact
    page = seen.page
    page.focus("#heatmap")
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    for _ in range(35):
        page.keyboard.press("ArrowDown")
    assert page.text_content("#heat-readout") == "Step 6, ranks 8960 to 9215: its own values were nonfinite"
    page.keyboard.press("Enter")
    page.wait_for_selector("#all-ranks:not([hidden])")
    page.wait_for_selector("#heatmap[aria-label^='256 ranks']")
    page.click("#all-ranks")
    page.wait_for_selector("#heatmap[aria-label^='16384 ranks']")


def test_the_page_can_be_used_with_keys_alone(
    coordinator: Coordinator, tell: Callable[..., RelayClient], visit: Any
) -> None:
    """Tab reaches the skip link first, then everything in order; curves and heat map answer to arrows in words."""
    tell("run", TrainingStory(4, {5: 2}), range(12))
    page = visit(run_page(coordinator, "run")).page
    page.wait_for_selector("html[data-drawn]")
    page.keyboard.press("Tab")
    assert page.text_content(":focus") == "Skip to content"
    page.focus("[data-curve=loss_scale] svg")
    page.keyboard.press("ArrowLeft")
    assert page.text_content("[data-curve=loss_scale] output").startswith("Step 11: ")
    page.focus("#heatmap")
    page.keyboard.press("ArrowLeft")
    assert page.text_content("#heat-readout") == "Step 11, rank 0: clean"


def test_what_a_screen_reader_gets(coordinator: Coordinator, tell: Callable[..., RelayClient], visit: Any) -> None:
    """Pictures have names that say what they show, every section its heading, and the heat map is there as a table."""
    tell("run", TrainingStory(4, {5: 2}), range(12))
    page = visit(run_page(coordinator, "run")).page
    page.wait_for_selector("html[data-drawn]")
    assert page.get_attribute("#heatmap", "aria-label") == (
        "4 ranks, 12 rounds up to step 11: own nonfinite values in 1 round, first at step 5."
    )
    label = page.get_attribute("[data-curve=loss] svg", "aria-label")
    assert label.startswith("Loss from ")
    assert label.endswith("at step 11")
    page.click("summary")
    rows = page.locator("#unusual tbody tr").all_inner_texts()
    assert [row.split("\t")[0:4:2] for row in rows if row.startswith("5\t")] == [
        ["5", "its own values were nonfinite"],
        ["5", "received nonfinite or wrong values"],
    ]
    for section in page.locator("main section").all():
        assert section.get_attribute("aria-labelledby") or section.get_attribute("aria-label")
    assert page.locator("h1").count() == 1
    assert page.get_attribute("html", "lang") == "en"


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_cut_off(
    coordinator: Coordinator, tell: Callable[..., RelayClient], visit: Any, width: int, theme: str
) -> None:
    """At both widths, in both themes, no page scrolls sideways, and the background follows the theme."""
    tell(
        "a-run-with-quite-a-long-name-2026-11-30T17-42-36-attempt-with-everything",
        TrainingStory(16, {8: 11}),
        range(12),
    )
    wait_until(coordinator.incidents, "the incident is on disk")
    [incident] = coordinator.incidents()
    pages = ("/", f"/run?id={incident.run_id}", f"/incident?id={incident.id}")
    seen = visit("about:blank", width, theme)
    for path in pages:
        seen.page.goto(f"{coordinator.http_url}{path}")
        seen.page.wait_for_selector(LIVE)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width, path
        red = int(seen.page.evaluate("getComputedStyle(document.body).backgroundColor").split("(")[1].split(",")[0])
        assert (red > 128) == (theme == "light")


def test_a_coordinator_that_goes_away_is_told(coordinator: Coordinator, visit: Any) -> None:
    """The page says that nobody answers any more instead of looking healthy for ever."""
    page = visit(coordinator.http_url).page
    page.wait_for_selector(LIVE)
    coordinator.stop()
    page.wait_for_selector("#link[data-state=lost]")
    assert page.text_content("#link") == "coordinator does not answer"


def test_a_run_of_the_past_is_a_quiet_page(tmp_path: Path, visit: Any) -> None:
    """A run that is only in the database shows its incidents, says that nothing is live, and asks for nothing that is not there."""
    write_database(tmp_path, incident())
    with Coordinator(CoordinatorSettings(run_dir=tmp_path)) as coordinator:
        seen = visit(f"{coordinator.http_url}/run?id={RUN}")
        seen.page.wait_for_selector(LIVE)
        assert "not being watched" in seen.page.text_content("#heat-readout")
        assert seen.page.locator(".incident").count() == 1
        seen.assert_well_behaved(coordinator.http_url)


def test_signing_in(tmp_path: Path, visit: Any) -> None:
    """A guarded coordinator shows a form, refuses a wrong token in words, and lets the right one in."""
    settings = CoordinatorSettings(run_dir=tmp_path, http_token="a-token-of-some-length")  # type: ignore[arg-type]
    with Coordinator(settings) as guarded:
        page = visit(guarded.http_url).page
        page.fill("#token", "wrong")
        page.click("button")
        page.wait_for_selector(".problem")
        page.fill("#token", "a-token-of-some-length")
        page.click("button")
        page.wait_for_selector(LIVE)
        assert page.url.rstrip("/") == guarded.http_url


@pytest.fixture
def training(tmp_path: Path, coordinator: Coordinator) -> Iterator[subprocess.Popen[bytes]]:
    """A real training that reports to the coordinator."""
    command = [sys.executable, "-m", "sentinel.cli.main", "run", "--standalone", "--nproc-per-node", "2"]
    command += ["--sentinel-run-dir", str(tmp_path / "run"), "--sentinel-run-id", "digits"]
    command += ["--sentinel-join", str(coordinator.run_dir / "join.json")]
    script = ROOT / "scripts" / "demo_scenes" / "segmentation.py"
    with (tmp_path / "said").open("wb") as said:
        started = subprocess.Popen(
            [*command, str(script)], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=said, stderr=said
        )
    yield started
    started.kill()
    started.wait(20)


@pytest.mark.e2e
def test_a_real_training_shows_up(coordinator: Coordinator, training: subprocess.Popen[bytes], visit: Any) -> None:
    """A page opened before the job shows the run, its NaN, and the incident's bundle with the flat image, as they happen."""
    seen = visit(coordinator.http_url)
    page = seen.page
    page.set_default_timeout(100_000)
    page.click("td .id:has-text('digits')")
    page.wait_for_selector(".verdict.critical")
    page.click(".incident h3 a")
    page.wait_for_selector("li:has-text('rank 1, sample 5 of')")
    assert "complete" in page.text_content("section[aria-labelledby=bundle]")
    seen.assert_well_behaved(coordinator.http_url)
