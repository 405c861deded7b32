"""A real Chromium for tests: Debian's package, driven by Playwright; and what every page must hold.

`Tab.check` fails on errors in the browser's console, on requests that leave the server, and on what axe-core
finds serious. Where there is no browser the tests are skipped, unless TINKEX_TEST_BROWSER asks for one.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
SIZES = {"wide": (1400, 900), "narrow": (390, 844)}
_ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def executable() -> str:
    """The browser; skips the test if there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        why = "no browser is installed: `apt-get install chromium` brings one"
        pytest.fail(why) if os.environ.get("TINKEX_TEST_BROWSER") else pytest.skip(why)
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = executable()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_ARGS)
        yield browser
        browser.close()


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for something to become true, which a page's policy lets no script of ours wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


class Tab:
    """One page of the browser, which watches for what must not happen."""

    def __init__(self, browser: Any, url: str, size: str = "wide", scheme: str = "light") -> None:
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page, self._url, self.problems = context.new_page(), url, list[str]()
        self.look = scheme if size == "wide" and scheme == "dark" else size
        self.page.set_default_timeout(15_000)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("request", self._requested)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def _requested(self, request: Any) -> None:
        if urlsplit(request.url).netloc != urlsplit(self._url).netloc:
            self.problems.append(f"a request to {request.url}")

    def log_in(self, key: str) -> None:
        self.page.goto(f"{self._url}/")
        self.page.fill("#key", key)
        self.page.click("main button")
        self.page.wait_for_url("**/console/runs")

    def forgive(self, *texts: str) -> None:
        """Forget the problems with one of these texts, which a test brought about."""
        self.problems = [one for one in self.problems if not any(text in one for text in texts)]

    def go(self, path: str) -> Any:
        self.page.goto(f"{self._url}{path}")
        return self.page

    def check(self) -> None:
        """The page as it is now: accessible, within its window, and nothing went wrong so far."""
        assert self.problems == []
        over = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert over <= 0, f"{self.page.url} is {over} pixels too wide"
        # Through the debugger, not as a script of the page: its policy allows no other scripts than ours.
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        serious = [
            f"{v['id']}: {v['help']} at {[n['html'][:160] for n in v['nodes'][:3]]}"
            for v in found["violations"]
            if v["impact"] in ("serious", "critical")
        ]
        assert serious == [], self.page.url
