"""A real headless Chromium for tests of pages: what it drew, what it complained about, what it asked for."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.wait import WebDriverWait

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


@contextmanager
def chromium(profile: Path) -> Iterator[Chrome]:
    """A browser with a fresh profile directory; needs Debian's chromium and chromium-driver."""
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    environment = {**os.environ, "HOME": str(profile)}
    browser = Chrome(options, ChromeService("/usr/bin/chromedriver", env=environment))
    try:
        browser.get("about:blank")  # the browser's own start page asks for its parts
        yield browser
    finally:
        browser.quit()


def show(browser: Chrome, page: Path, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
    """Load a page at a size in CSS pixels and wait until its figures near the window are drawn."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone},
    )
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})
    complaints(browser), requests(browser)  # those of the page before
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())
    settle(browser, "window.report && (report.drawn > 0 || report.total === 0)")


def settle(browser: Chrome, condition: str) -> None:
    """Wait until a JavaScript expression holds."""
    WebDriverWait(browser, 30, 0.05).until(lambda b: b.execute_script(f"return Boolean({condition})"))


def draw_all(browser: Chrome, width: int, phone: bool = False) -> int:
    """Make the window as tall as the page, so that everything is drawn; returns the page's height."""
    for _ in range(2):
        height = browser.execute_script("return document.documentElement.scrollHeight")
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone},
        )
        settle(browser, "report.drawn === report.total")
    return height


def complaints(browser: Chrome) -> list[str]:
    """Everything at level warning or worse on the console since the last call."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def requests(browser: Chrome) -> list[str]:
    """Every address asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
