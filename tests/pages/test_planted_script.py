"""Script in file names, class names, DICOM tags, model cards and logs, in a real browser: it is text and never runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import needs_browser, open_page, serve_app, wait_until
from PIL import Image

from halfmoon.pages.label import LabelOptions, LabelPage
from halfmoon.pages.watch import WatchPage
from halfmoon.sites.folders import read_site
from halfmoon.sites.inference.card_document import CARD_FILES, write_card
from halfmoon.storage import events

pytestmark = needs_browser

PAYLOADS = (
    "<img src=x onerror=window.planted=1>",
    "<svg onload=window.planted=1>",
    '" onmouseover=window.planted=1 x="',
    "javascript:window.planted=1",
)
"""Names without a slash, so that they can be names of files."""


def has_run(browser: Any) -> bool:
    """Check whether a payload has run, after the page had time for it."""
    browser.execute_async_script("const done = arguments[0]; setTimeout(done, 200)")
    for element in browser.find_elements("css selector", "a, button, td, li, h1, h2, span"):
        browser.execute_script("arguments[0].dispatchEvent(new MouseEvent('mouseover', { bubbles: true }))", element)
    return bool(browser.execute_script("return Boolean(window.planted)"))


def test_names_and_tags_of_images_are_text(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("pydicom")
    from fuzz_targets import make_dicom_file

    pixels = np.arange(64, dtype=np.uint16).reshape(8, 8)
    for n, payload in enumerate(PAYLOADS):
        header = dict.fromkeys(("PatientName", "SeriesDescription", "StudyDescription", "ImageComments"), payload)
        file = make_dicom_file(pixels, StudyInstanceUID=f"1.2.{n}", SeriesNumber=n, InstanceNumber=1, **header)
        (tmp_path / f"{payload}.dcm").write_bytes(file)
        Image.new("RGB", (16, 16), (n, 10, 10)).save(tmp_path / f"{payload}.png")
    (tmp_path / "classes.txt").write_text("".join(f"{payload}\n" for payload in PAYLOADS))
    with serve_app(LabelPage(read_site(tmp_path), (), None, LabelOptions(seed=0)).app()) as address:
        open_page(browser, address)
        for _ in range(2 * len(PAYLOADS)):
            name = wait_until(lambda: browser.find_element("id", "path").text)
            assert any(payload in name for payload in PAYLOADS)
            assert not has_run(browser)
            browser.execute_script("document.dispatchEvent(new KeyboardEvent('keydown', { key: 's' }))")
        assert any(
            PAYLOADS[0] in button.text for button in browser.find_elements("css selector", "#class-buttons button")
        )


def test_the_lines_of_a_model_card_are_text(browser: Any, tmp_path: Path) -> None:
    write_card(tmp_path, PAYLOADS[0], {payload: list(PAYLOADS) for payload in PAYLOADS})
    browser.get((tmp_path / CARD_FILES[1]).as_uri())
    assert browser.find_element("css selector", "h1").text == PAYLOADS[0]
    assert not has_run(browser)
    assert [item.text for item in browser.find_elements("css selector", "li")][:4] == [p.strip() for p in PAYLOADS]


def test_a_planted_script_would_be_found(browser: Any, tmp_path: Path) -> None:
    """A page that does not escape runs the payload, so that the tests above can fail."""
    (tmp_path / "page.html").write_text(f"<body><span>{PAYLOADS[0]}</span>")
    browser.get((tmp_path / "page.html").as_uri())
    assert has_run(browser)


def test_names_and_errors_of_sites_are_text(browser: Any, tmp_path: Path) -> None:
    log = events.EventLog(tmp_path / "serve.log")
    log.record("started", PAYLOADS[0], federation=PAYLOADS[0], method=PAYLOADS[1], rounds=5)
    for payload in PAYLOADS:
        log.record("site_joined", f"{payload} is there", site=payload, labeled=4, unlabeled=5)
        log.record(
            "reply_rejected", f"refused in round 1: the answer of {payload}: {payload}", site=payload, reason=payload
        )
    with serve_app(WatchPage(tmp_path).app()) as address:
        open_page(browser, address)
        wait_until(lambda: PAYLOADS[0] in browser.find_element("tag name", "body").text)
        assert not has_run(browser)
