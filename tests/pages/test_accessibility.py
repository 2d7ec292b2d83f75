"""Every page under axe-core in a real browser: contrast, headings, names, keyboard; wide, narrow, light and dark."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from browsers import needs_browser, press_keys, serve_app, set_viewport, wait_until
from PIL import Image
from report_folders import write_run, write_sweep

from halfmoon.pages.label import LabelOptions, LabelPage
from halfmoon.pages.label_order import Predictions
from halfmoon.pages.review import ReviewPage
from halfmoon.pages.watch import WatchPage
from halfmoon.report.gather import gather_studies
from halfmoon.report.page import render_html
from halfmoon.sites.folders import read_site
from halfmoon.storage.events import EventLog

axe = pytest.importorskip(
    "axe_core_python.selenium", reason="axe-core-python is not installed: pip install -e '.[dev]'"
)
pytestmark = needs_browser
ROOT = Path(__file__).resolve().parents[2]


def violations(browser: Any) -> list[str]:
    """List the violations that axe-core finds in the current page: rule and elements."""
    found = axe.Axe().run(browser)
    assert len(found["passes"]) > 15
    return [f"{rule['id']}: {node['target']}" for rule in found["violations"] for node in rule["nodes"]]


def check(browser: Any, address: str, ready: Callable[[], Any] = lambda: True) -> None:
    """Check that a page has no violation, at two widths and in both color schemes."""
    for width, dark in ((1280, False), (390, True)):
        set_viewport(browser, width, dark=dark)
        browser.get(address)
        wait_until(ready)
        assert violations(browser) == [], (width, dark)


def test_a_fault_is_noticed(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text('<html><body><img src="a.png"><p style="color:#bbb;background:#fff">pale</p>' + "<p>words</p>" * 20)
    browser.get(path.as_uri())
    found = axe.Axe().run(browser)["violations"]
    assert {"image-alt", "color-contrast", "html-has-lang"} <= {rule["id"] for rule in found}


def test_the_report_is_accessible(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(render_html(gather_studies([write_sweep(tmp_path)])), encoding="utf-8")
    check(browser, path.as_uri())


def test_watch_is_accessible(browser: Any, tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / str(seed), 1, seed)
    with serve_app(WatchPage(tmp_path).app()) as address:
        check(browser, address, lambda: browser.find_elements("css selector", "[data-chart=accuracy] .line path"))


def site(path: Path) -> Path:
    for n in range(4):
        Image.new("L", (16, 16), 50 * n).save(path / f"{n}.png")
    (path / "labels.csv").write_text("path,label\n0.png,cat\n1.png,dog\n")
    (path / "classes.txt").write_text("cat\ndog\n")
    return path


def test_labeling_is_accessible(browser: Any, tmp_path: Path) -> None:
    with serve_app(LabelPage(read_site(site(tmp_path)), (), None, LabelOptions()).app()) as address:
        check(browser, address, lambda: browser.find_element("id", "path").text)


def test_selected_images_are_accessible(browser: Any, tmp_path: Path) -> None:
    """The grid of the labeling page with the classes for all selected images."""
    with serve_app(LabelPage(read_site(site(tmp_path)), (), None, LabelOptions()).app()) as address:

        def selected() -> Any:
            if not browser.find_element("id", "path").text:
                return False
            press_keys(browser, "w", "a")
            return browser.find_element("id", "bulk-labels").is_displayed()

        check(browser, address, selected)


def test_review_is_accessible(browser: Any, tmp_path: Path) -> None:
    """The grid with selected images, and the quality."""
    probabilities = np.array([[0.8, 0.2], [0.6, 0.4], [0.3, 0.7], [0.1, 0.9]])
    predictions = Predictions(probabilities, np.zeros((4, 1)), ("cat", "dog"))
    done = SimpleNamespace(result=predictions, classes=("cat", "dog"), count=4, total=4, error="")
    page = ReviewPage("a model", read_site(site(tmp_path)), done)  # pyright: ignore[reportArgumentType]
    with serve_app(page.app()) as address:

        def selected() -> Any:
            if not browser.find_elements("css selector", "#image-grid .cell"):
                return False
            press_keys(browser, "a")
            return browser.find_element("id", "bulk-labels").is_displayed()

        check(browser, address, selected)
        press_keys(browser, "q")
        wait_until(lambda: browser.find_elements("css selector", "#confusion button"))
        assert violations(browser) == []


def test_watch_of_a_federation_with_alarms_is_accessible(browser: Any, tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / str(seed), 1, seed, finished=False, config="rounds = 20\n")
        os.utime(tmp_path / str(seed) / "metrics.jsonl", (1, 1))  # nothing for years: an alarm
        os.utime(tmp_path / str(seed) / "timings.jsonl", (1, 1))
    joined = {"site": "west", "labeled": 4, "unlabeled": 40}
    EventLog(tmp_path / "serve.log").record("site_joined", "west is there", **joined)
    EventLog(tmp_path / "serve.log").record("reply_late", "east was late", site="east")
    with serve_app(WatchPage(tmp_path).app()) as address:
        check(browser, address, lambda: browser.find_elements("css selector", "#alarms li li"))
        assert len(browser.find_elements("css selector", "#sites-table tbody tr")) == 2


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the site without the API and without running the examples, and serve it."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[dev]'")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    sys.path.append(str(ROOT / "tools"))
    import gallery

    node = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery, "execute", lambda text: None)
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(node), strict=False)
        for name in ("mkdocstrings", "autorefs"):
            config.plugins.pop(name, None)
        patch.setattr(config.hooks["tools/docs_site.py"], "packages", list)
        config.nav = [each for each in config.nav if "API" not in each]
        build(config)
    handler = partial(SimpleHTTPRequestHandler, directory=str(node))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@pytest.mark.nightly  # axe-core needs long for its long pages
def test_the_docs_are_accessible(browser: Any, docs: str) -> None:
    check(browser, docs + "quickstart/")
    browser.get(docs)
    assert violations(browser) == []


@pytest.mark.parametrize(("message", "page"), [("server_ema", "options/"), ("fedduRe", "methods/feddure/")])
def test_the_search_of_the_docs_finds_options_and_methods(browser: Any, docs: str, message: str, page: str) -> None:
    set_viewport(browser, 1280)
    browser.get(docs)
    node = browser.find_element("css selector", "input.md-search__input")
    node.click()
    node.send_keys(message)
    links = wait_until(lambda: browser.find_elements("css selector", ".md-search-result__link"))
    assert links[0].get_attribute("href").startswith(docs + page)
