"""Debian's Chromium, driven by Playwright."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
# As root there is no sandbox. The rest keeps the browser from asking servers of its own.
_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
DEADLINE = 40_000.0  # milliseconds; 20 times what is expected


@dataclass
class Observed:
    """What a page did besides showing something."""

    errors: list[str] = field(default_factory=list)  # on the console, and exceptions
    dialogs: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def running() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, url: str, width: int = 1400, height: int = 900, scheme: str = "light", ready: str = "main"
) -> Iterator[tuple[Page, Observed]]:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore
    page, observed = context.new_page(), Observed()
    page.set_default_timeout(DEADLINE)
    page.on("console", lambda message: observed.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: observed.errors.append(str(error)))
    page.on("request", lambda request: observed.requests.append(request.url))

    def dismissed(dialog: object) -> None:
        observed.dialogs.append(str(dialog))
        dialog.dismiss()  # type: ignore[attr-defined]

    page.on("dialog", dismissed)
    page.goto(url)
    page.wait_for_selector(ready)
    try:
        yield page, observed
    finally:
        context.close()
