"""Headless Chromium, looking at a running server as a person would."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright, expect

from tests.serving import ServerProcess

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome-stable", "google-chrome")
TIMEOUT_MS = 60_000

expect.set_options(timeout=TIMEOUT_MS)


def launch(playwright: Playwright) -> Browser:
    """Skips where there is no browser."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None and not Path(playwright.chromium.executable_path).exists():
        pytest.skip("no Chromium: `apt-get install chromium-headless-shell`, or `playwright install chromium`")
    return playwright.chromium.launch(executable_path=program, args=["--disable-quic"])


@contextmanager
def visiting(browser: Browser, server: ServerProcess, **options: Any) -> Iterator[Page]:
    """The page of ``server`` in a browser of its own. Afterwards: no script failed, nothing broke the page's policy,
    and nothing was asked of another host."""
    context = browser.new_context(**options)
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    troubles: list[str] = []
    asked: set[str] = set()
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: (troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: asked.add(request.url))
    page.on(
        "console", lambda said: troubles.append(said.text) if said.type == "error" and is_trouble(said.text) else None
    )
    try:
        page.goto(server.url)
        yield page
    finally:
        context.close()
    assert troubles == []
    assert {url for url in asked if not url.startswith(server.url + "/")} == set()


def is_trouble(said: str) -> bool:
    """A refused or failed request also counts as an error to the browser, and is none to the page."""
    return not said.startswith("Failed to load resource")


def say(page: Page, text: str) -> None:
    page.locator("#question").fill(text)
    page.locator("#question").press("Enter")
