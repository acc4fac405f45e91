"""The report page in a real browser: nothing is loaded, nothing sticks out, at desk and phone width, light, dark and in print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import past
import pytest
import story

from sentinel.postmortem.report.facts import gather
from sentinel.postmortem.report.page import report_html

Open = Callable[..., Any]


@pytest.fixture
def address(tmp_path: Path) -> str:
    """A report of an incident among 64 ranks, with images, long names and a hostile note."""
    bundle = story.write_bundle(tmp_path)
    name = "model.decoder.layers.31.self_attention.query_key_value.weight_of_a_very_long_name"
    note = "<script>document.title='owned'</script>"
    finding = story.incident().findings[0].model_copy(update={"note": note})
    incident = story.incident(world_size=64, parameters=(name,) * 12, findings=(finding,))
    path = tmp_path / "report.html"
    path.write_text(report_html([gather(incident, bundle, tmp_path, past.log(world_size=64))], "incident"))
    return path.as_uri()


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_fits_and_loads_nothing(visit: Open, address: str, width: int, theme: str) -> None:
    """No horizontal scrolling of the page, no request but its own, no message of the console, no script run."""
    opened = visit(address, width, theme)
    page = opened.page
    assert page.title() == "incident"
    assert page.locator("html").evaluate("e => e.scrollWidth") <= width
    assert page.locator("rect.cell").count() > 48 * 10
    assert page.locator(".sample img").first.evaluate("e => e.naturalWidth") > 0
    assert all(url.startswith(("file:", "data:")) for url in opened.requests)
    assert opened.complaints == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read(visit: Open, address: str, theme: str) -> None:
    """Headings, prose and table text stand out from their ground by the ratio that accessibility rules ask for (4.5)."""
    page = visit(address, theme=theme).page
    card = luminance(page.locator("section").first.evaluate("e => getComputedStyle(e).backgroundColor"))
    for selector in ("h1", "h2", ".note", "dt", "dd", "td", ".bad", ".legend"):
        text = luminance(page.locator(selector).first.evaluate("e => getComputedStyle(e).color"))
        ratio = (max(card, text) + 0.05) / (min(card, text) + 0.05)
        assert ratio >= 4.5, f"{selector}: {ratio:.2f}"


def test_page_prints(visit: Open, address: str) -> None:
    """Printing gives a PDF of a few pages, on white even where the screen is dark."""
    page = visit(address, theme="dark").page
    page.emulate_media(media="print")
    assert page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(255, 255, 255)"
    printed = page.pdf(format="A4")
    assert printed.startswith(b"%PDF")
    assert 1 <= printed.count(b"/Type /Page\n") <= 40


def luminance(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)``."""
    channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
