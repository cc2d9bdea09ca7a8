"""A headless browser."""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, sync_playwright


@pytest.fixture(scope="session")
def browser():
    # The browser of the system; `playwright install` would download another one.
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser) -> Iterator[Page]:
    page = browser.new_page()
    yield page
    page.close()
