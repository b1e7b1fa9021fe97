"""A headless Chromium for tests, driven by ChromeDriver."""

import base64
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]


class Browser:
    """One window.

    Args:
        driver: of the browser.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, *, width: int, dark: bool) -> None:
        """Show a page as a device of this width, in light or dark colors."""
        self.become(width=width, dark=dark)
        self.driver.get(page.resolve().as_uri())

    def become(self, *, width: int, dark: bool) -> None:
        """Show the same page as another device, without loading it again."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def run_scripts_of_pages(self, allowed: bool) -> None:
        """Set whether pages that are opened from now on run their own scripts; `run` and `wait` always work."""
        self.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not allowed})

    def run(self, script: str) -> Any:
        """Return the result of a piece of JavaScript."""
        return self.driver.execute_script(script)

    def wait(self, script: str) -> Any:
        """Return the result of a promise."""
        return self.driver.execute_async_script(f"const done = arguments[0]; ({script}).then(done, done)")

    def complaints(self) -> list[str]:
        """Return the console messages since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser with a profile of its own, and end it."""
    # Imported here, because only tests with a browser need this package.
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        try:
            driver.set_script_timeout(20)
            yield Browser(driver)
        finally:
            driver.quit()
