"""A headless Chromium for the tests of pages, and a page's app served in a thread."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install -e '.[dev]'")
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="no Chromium with its driver: apt-get install chromium chromium-driver"
)


@contextmanager
def start_chromium() -> Iterator[Any]:
    """Start a headless browser whose console log can be read."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    driver.set_script_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


@contextmanager
def serve_app(app: Any) -> Iterator[str]:
    """Serve a page's app with its access control in a thread, and yield its address."""
    from halfmoon.pages.server import serve_in_background
    from halfmoon.storage.events import NullRecorder

    with serve_in_background(app, "page", None, NullRecorder()) as address:
        yield address


def wait_until(condition: Callable[[], Any], seconds: float = 8.0) -> Any:
    """Wait until a condition returns a true value, and return that value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"the condition is not met after {seconds} s")


def set_viewport(browser: Any, width: int, height: int = 900, dark: bool = False) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700},
    )
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})


def open_page(browser: Any, address: str, width: int = 1400, dark: bool = False) -> None:
    """Open a page, and wait until it is drawn."""
    set_viewport(browser, width, dark=dark)
    browser.get("about:blank")  # an earlier page whose server has ended may log errors: they are discarded here
    browser.get_log("browser")
    browser.get(address)
    wait_until(lambda: browser.execute_script("return document.body.dataset.ready"))


BROKEN_WORDS = """
const words = new Set(arguments[0]);
const broken = [];
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  for (const match of texts.currentNode.textContent.matchAll(/[^\\s]+/g)) {
    if (!words.has(match[0])) continue;
    const range = document.createRange();
    range.setStart(texts.currentNode, match.index);
    range.setEnd(texts.currentNode, match.index + match[0].length);
    const lines = new Set([...range.getClientRects()].filter((box) => box.width).map((box) => Math.round(box.top)));
    if (lines.size > 1) broken.push(match[0]);
  }
}
return broken;
"""


def find_broken_words(browser: Any, names: Iterable[str]) -> list[str]:
    """List words of the names, such as those of classes, that a page breaks into several lines."""
    return browser.execute_script(BROKEN_WORDS, [word for name in names for word in name.split()])


def tap(browser: Any, element: Any) -> None:
    """Scroll no more than needed to show an element, and tap into its middle, as a finger on a phone does."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.pointer_input import PointerInput

    browser.execute_script("arguments[0].scrollIntoView({ block: 'nearest' })", element)
    x, y = browser.execute_script(
        "const box = arguments[0].getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]",
        element,
    )
    actions = ActionChains(browser, duration=0, devices=[PointerInput("touch", "finger")])
    # At the position, not at the element: what covers it is tapped instead.
    actions.w3c_actions.pointer_action.move_to_location(round(x), round(y)).pointer_down().pointer_up()
    actions.perform()


def press_keys(browser: Any, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    for key in keys:
        ActionChains(browser, duration=0).send_keys(key).perform()
