"""Every page under axe-core in a real browser: contrast, headings, names, keyboard; wide, narrow, light and dark."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from browsers import needs_browser, serving, sized, until
from page_scenes import write_run, write_sweep
from PIL import Image

from halfmoon.pages.label import LabelOptions, LabelPage
from halfmoon.pages.watch import WatchPage
from halfmoon.report.gather import gather_studies
from halfmoon.report.page import render_html
from halfmoon.sites.folders import read_site

axe = pytest.importorskip(
    "axe_core_python.selenium", reason="axe-core-python is not installed: pip install -e '.[dev]'"
)
pytestmark = needs_browser
ROOT = Path(__file__).resolve().parents[2]


def violations(browser: Any) -> list[str]:
    """List the violations that axe-core finds in the current page: rule and elements."""
    found = axe.Axe().run(browser)
    assert len(found["passes"]) > 15
    return [f"{rule['id']}: {place['target']}" for rule in found["violations"] for place in rule["nodes"]]


def check(browser: Any, address: str, ready: Callable[[], Any] = lambda: True) -> None:
    """Check that a page has no violation, at two widths and in both color schemes."""
    for width, dark in ((1280, False), (390, True)):
        sized(browser, width, dark=dark)
        browser.get(address)
        until(ready)
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
    with serving(WatchPage(tmp_path).app()) as address:
        check(browser, address, lambda: browser.find_elements("css selector", "[data-chart=accuracy] path.line"))


def site(path: Path) -> Path:
    for n in range(4):
        Image.new("L", (16, 16), 50 * n).save(path / f"{n}.png")
    (path / "labels.csv").write_text("path,label\n0.png,cat\n1.png,dog\n")
    (path / "classes.txt").write_text("cat\ndog\n")
    return path


def test_labeling_is_accessible(browser: Any, tmp_path: Path) -> None:
    with serving(LabelPage(read_site(site(tmp_path)), (), None, LabelOptions()).app()) as address:
        check(browser, address, lambda: browser.find_element("id", "path").text)


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the site without the API and without running the examples, and serve it."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[dev]'")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    sys.path.append(str(ROOT / "tools"))
    import gallery

    place = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery, "executed", lambda text: None)
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(place), strict=False)
        for name in ("mkdocstrings", "autorefs"):
            config.plugins.pop(name, None)
        patch.setattr(config.hooks["tools/docs_site.py"], "packages", list)
        config.nav = [each for each in config.nav if "API" not in each]
        build(config)
    handler = partial(SimpleHTTPRequestHandler, directory=str(place))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


def test_the_docs_are_accessible(browser: Any, docs: str) -> None:
    check(browser, docs + "quickstart/")
    browser.get(docs)
    assert violations(browser) == []


@pytest.mark.parametrize(("words", "page"), [("server_ema", "options/"), ("fedduRe", "methods/feddure/")])
def test_the_search_of_the_docs_finds_options_and_methods(browser: Any, docs: str, words: str, page: str) -> None:
    sized(browser, 1280)
    browser.get(docs)
    place = browser.find_element("css selector", "input.md-search__input")
    place.click()
    place.send_keys(words)
    links = until(lambda: browser.find_elements("css selector", ".md-search-result__link"))
    assert links[0].get_attribute("href").startswith(docs + page)
