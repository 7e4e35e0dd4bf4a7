"""The page with the slider, in a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

SLIDER = Path(__file__).parents[1] / "docs" / "slider.html"


@pytest.mark.slow
def test_the_slider_reaches_softmax() -> None:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(names)} is on PATH")
    with sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-gpu", "--disable-sync"]
        browser = driver.chromium.launch(executable_path=found, args=options, timeout=120_000)
        page = browser.new_page(viewport={"width": 390, "height": 844})
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(SLIDER.as_uri())
        for order, off in (("2", "0.469"), ("10", "0.012"), ("20", "0.000")):
            page.locator("#order").fill(order)
            expect(page.locator("#shown")).to_have_text(order)
            expect(page.locator("#told")).to_contain_text(off)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator("#softmax rect").count() == 13 * 14 // 2
        assert not faults
        browser.close()
