"""The last scrape: waited for exactly where somebody scrapes and has not seen every incident."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from relay_client import RelayClient, fault_of, hello

from sentinel.coordinator.app import Coordinator
from sentinel.coordinator.config import CoordinatorSettings
from sentinel.coordinator.scrapes import SCRAPER_GONE_SECONDS, Scrapes


def test_nobody_is_waited_for_where_nobody_scrapes() -> None:
    """Without a scraper, or with one that stopped coming, the wait is over at once."""
    scrapes = Scrapes()
    started = time.monotonic()
    assert not scrapes.wait_for_one_with(1)
    scrapes.note(0, started - SCRAPER_GONE_SECONDS - 1)
    assert not scrapes.wait_for_one_with(1)
    assert time.monotonic() - started < 0.5


def test_what_was_seen_is_not_waited_for() -> None:
    """A scraper that has every incident already costs nothing, and neither does a healthy run."""
    scrapes = Scrapes()
    scrapes.note(1, time.monotonic())
    assert scrapes.wait_for_one_with(0)
    assert scrapes.wait_for_one_with(1)


def test_the_wait_ends_with_the_scrape_or_the_interval() -> None:
    """It is as long as the scraper needs to come, and a scraper that does not come ends it after about one interval."""
    scrapes = Scrapes()
    now = time.monotonic()
    scrapes.note(0, now - 0.2)
    scrapes.note(0, now)
    started = time.monotonic()
    assert not scrapes.wait_for_one_with(1)
    assert 0.2 <= time.monotonic() - started < 5
    scrapes.note(0, time.monotonic())
    late = threading.Timer(0.05, lambda: scrapes.note(1, time.monotonic()))
    late.start()
    assert scrapes.wait_for_one_with(1)
    late.join()


def test_a_scraper_that_was_told_is_waited_for() -> None:
    """A scraper that was told where to find a run gets its first scrape, unless it was told long ago and never came."""
    scrapes = Scrapes()
    scrapes.expect(time.monotonic() - SCRAPER_GONE_SECONDS - 1)
    assert not scrapes.wait_for_one_with(1)
    scrapes.expect(time.monotonic())
    late = threading.Timer(0.05, lambda: scrapes.note(1, time.monotonic()))
    late.start()
    assert scrapes.wait_for_one_with(1)
    late.join()


def test_a_stopping_coordinator_shows_its_last_incident(tmp_path: Path, relays: Callable[..., RelayClient]) -> None:
    """An incident after the last scrape is in one more scrape before the pages close."""
    coordinator = Coordinator(CoordinatorSettings(run_dir=tmp_path / "run", run_id="run")).start()
    assert coordinator.http_url is not None
    scraped = [httpx.get(f"{coordinator.http_url}/metrics").text for _ in range(2)]
    relay = relays(coordinator.join)
    relay.send([hello(0), hello(1)])
    relay.await_ack(relay.send(fault_of(1)))
    stopping = threading.Thread(target=coordinator.stop)
    coordinator._scrapes._interval = 10.0  # as a slow scraper's; the two above came at once
    stopping.start()
    scraped.append(httpx.get(f"{coordinator.http_url}/metrics").text)
    stopping.join(20)
    line = 'kind="nonfinite_gradient",severity="critical"} 1'
    assert [line in text for text in scraped] == [False, False, True]
