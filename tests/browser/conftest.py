"""A headless Chromium, and pages in it that note every request and every word on the console."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium; the test is skipped with a clear line where there is none (and fails in CI)."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("chromium is not installed (as root: apt-get install chromium)")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=program, args=list(FLAGS))
        yield launched
        launched.close()


@dataclass
class Visit:
    """One page, what it asked for, and what it complained about."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def assert_well_behaved(self, host: str) -> None:
        """No request left this machine, and nothing was said on the console."""
        assert {urlsplit(url).netloc for url in self.requests} == {urlsplit(host).netloc}
        assert not self.complaints


Open = Callable[..., Visit]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens an address in a fresh profile of a given width and theme."""
    contexts: list[Any] = []

    def open_(url: str, width: int = 1280, theme: str = "light", **options: Any) -> Visit:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, **options)
        contexts.append(context)
        visit = Visit(context.new_page())
        visit.page.set_default_timeout(15_000)
        visit.page.on("request", lambda request: visit.requests.append(request.url))
        visit.page.on("console", lambda message: visit.complaints.append(f"{message.type}: {message.text}"))
        visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        visit.page.goto(url)
        return visit

    yield open_
    for context in contexts:
        context.close()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Any]:
    """A standing coordinator with pages."""
    from sentinel.coordinator.app import Coordinator
    from sentinel.coordinator.config import CoordinatorSettings

    with Coordinator(CoordinatorSettings(run_dir=tmp_path / "coordinator")) as started:
        yield started
