"""The built site in a real browser: the search and the slider, without a server.

``make docs`` runs these tests on what it has built, and names the folder in ``SITE``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from browser import launched

PHONE = 390  # pixels


@pytest.fixture(scope="module")
def site() -> str:
    if "SITE" not in os.environ:
        pytest.skip("make docs runs it on the site that it builds")
    return Path(os.environ["SITE"]).resolve().as_uri()


@pytest.fixture(scope="module")
def page(site: str) -> Iterator[Page]:
    """A page on a phone; the first fault of a script fails its test."""
    with launched() as browser:
        opened = browser.new_page(viewport={"width": PHONE, "height": 844})
        faults: list[str] = []
        opened.on("pageerror", lambda error: faults.append(str(error)))
        # What is not a file beside it is on the network.
        opened.on(
            "request",
            lambda asked: (
                None if asked.url.startswith(("file:", "data:")) else faults.append(asked.url)
            ),
        )
        yield opened
        assert not faults


def width(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth"))


def test_the_slider_reaches_softmax(site: str, page: Page) -> None:
    page.goto(f"{site}/slider.html")
    for order, off in (("2", "0.469"), ("10", "0.012"), ("20", "0.000")):
        page.locator("#order").fill(order)
        expect(page.locator("#shown")).to_have_text(order)
        expect(page.locator("#told")).to_contain_text(off)
    assert width(page) <= PHONE
    assert page.locator("#softmax rect").count() == 13 * 14 // 2


def test_the_search_finds_pages_and_names(site: str, page: Page) -> None:
    for words, found in (
        ("kronecker", "equations.html"),
        ("forget gate", "recurrent.html"),
        ("context_parallel_attention", "reference/operation.html#softmax_rnn."),
    ):
        page.goto(f"{site}/search.html?q={words}")
        results = page.locator("#search-results li a")
        expect(page.locator(f'#search-results a[href*="{found}"]').first).to_be_visible()
        assert results.count() < 40  # not every page
    page.goto(f"{site}/search.html?q=zweihundert")
    expect(page.locator("#search-results")).to_contain_text("did not match any documents")
    assert not page.locator("#search-results li").count()


@pytest.mark.parametrize(
    "name",
    ["index", "start", "tour", "equations", "howto/install", "reference/operation", "results"],
)
def test_a_page_fits_a_phone(name: str, site: str, page: Page) -> None:
    """What is wide scrolls in a box of its own."""
    page.goto(f"{site}/{name}.html")
    assert width(page) <= PHONE
