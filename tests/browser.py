"""The browser of the tests of pages."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

PATIENCE = 120_000  # milliseconds; a machine may be slow and busy


@contextlib.contextmanager
def launched() -> Iterator[Browser]:
    """Chromium or Chrome; without one the test is skipped."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"the tests of pages need a browser; none of {', '.join(names)} is on PATH")
    with sync_playwright() as driver:
        # Playwright gives it a new profile and turns its own traffic and first-run pages off.
        options = ["--no-sandbox", "--disable-gpu", "--disable-sync"]
        browser = driver.chromium.launch(executable_path=found, args=options, timeout=PATIENCE)
        yield browser
        browser.close()
