"""The page of `halfmoon review`: scores and tables by hand-made predictions, corrections in a real browser."""

import csv
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from browsers import find_broken_words, needs_browser, open_page, press_keys, serve_app, wait_until
from PIL import Image

from halfmoon.core.errors import UserError
from halfmoon.pages.label_order import Predictions
from halfmoon.pages.review import TABLE_COLUMNS, ReviewPage, open_folder_to_review
from halfmoon.sites.folders.labels import read_labels
from halfmoon.sites.inference.measure import compute_scores

CLASSES = ("=1+1", "dog", "ship")
PROBABILITIES = np.array([[0.7, 0.2, 0.1], [0.1, 0.9, 0], [0.3, 0.3, 0.4], [0.05, 0.05, 0.9], [np.nan] * 3])
NAMES = ("+a.png", "b.png", "c.png", "d.png", "e.png")


def through(probabilities: np.ndarray = PROBABILITIES, classes: tuple[str, ...] = CLASSES) -> Any:
    predictions = Predictions(probabilities, np.zeros((len(probabilities), 1)))
    return SimpleNamespace(result=predictions, classes=classes, count=5, total=5, error="")


def folder(path: Path, lines: str = "b.png,dog\nc.png,dog\n+a.png,=1+1\n") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for n, name in enumerate(NAMES):
        Image.new("L", (8, 8), 50 * n).save(path / name)
    (path / "labels.csv").write_text(f"path,label\n{lines}")
    (path / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    return path


def review(path: Path, **options: Any) -> ReviewPage:
    return ReviewPage("a model", open_folder_to_review(path, CLASSES), through(**options))


def make_request(**query: Any) -> Any:
    return SimpleNamespace(state=SimpleNamespace(body=json.dumps(query).encode()), query_params={})


def test_the_scores_are_those_of_evaluate(tmp_path: Path):
    found = review(folder(tmp_path)).get_scores(make_request())
    # +a: right, 0.7; b: right, 0.9; c: ship instead of dog, 0.4.
    assert found == compute_scores(np.array([0, 1, 1]), np.array([0, 1, 2]), np.array([0.7, 0.9, 0.4]), classes=CLASSES)
    assert found["accuracy"] == 2 / 3
    assert review(folder(tmp_path, "")).get_scores(make_request()) == {"images": 0}


def test_classes_that_the_model_does_not_know_are_left_out(tmp_path: Path):
    found = review(folder(tmp_path), classes=("dog", "=1+1", "cow"))
    seen = found.get_predictions(make_request())
    assert [found.store.classes[n] for n in seen["predicted"][:4]] == ["dog", "=1+1", "cow", "cow"]
    assert seen["predicted"][4] == -1
    assert found.get_scores(make_request())["images"] == 3


def test_table_has_no_formula(tmp_path: Path):
    text = review(folder(tmp_path)).get_table(make_request()).body.decode()
    rows = list(csv.reader(io.StringIO(text)))
    assert tuple(rows[0]) == TABLE_COLUMNS
    assert rows[1] == ["'+a.png", "'=1+1", "0.700000", "dog", "0.200000", "'=1+1", "yes"]
    assert rows[3] == ["c.png", "ship", "0.400000", "'=1+1", "0.300000", "dog", "no"]
    assert rows[5] == ["e.png", "", "", "", "", "", ""]
    assert not any(cell[:1] in ("=", "+", "-", "@") for row in rows for cell in row)


def test_class_folders_become_a_labels_file_with_the_first_correction(tmp_path: Path):
    for name in ("dog", "ship"):
        (tmp_path / name).mkdir()
        for n in range(2):
            Image.new("L", (8, 8), n).save(tmp_path / name / f"{n}.png")
    page = ReviewPage("a model", open_folder_to_review(tmp_path, CLASSES), through(PROBABILITIES[:4]))
    assert page.store.labels_from_folders
    assert list(page.store.labels) == [1, 1, 2, 2]
    page.get_state(make_request())  # a look at the disk leaves the names of the folders
    assert list(page.store.labels) == [1, 1, 2, 2]
    assert not (tmp_path / "labels.csv").exists()
    page.post_label(make_request(row=0, label="ship", previous="dog"))
    assert read_labels(tmp_path) == {
        "dog/0.png": "ship",
        "dog/1.png": "dog",
        "ship/0.png": "ship",
        "ship/1.png": "ship",
    }
    assert list(page.store.labels) == [2, 1, 2, 2]


def test_request_before_the_predictions_are_complete_gives_a_message(tmp_path: Path):
    page = review(folder(tmp_path))
    page.prediction = through()
    page.prediction.result = None
    with pytest.raises(UserError, match="has not predicted all images yet"):
        page.get_predictions(make_request())


@pytest.fixture
def page(tmp_path: Path) -> Iterator[str]:
    with serve_app(review(folder(tmp_path)).app()) as address:
        yield address


def cells(browser: Any) -> list[str]:
    found = browser.find_elements("css selector", "#image-grid .cell")
    found.sort(key=lambda cell: int(cell.get_attribute("data-position")))
    return [each.get_attribute("title") for each in found]


def chosen(browser: Any, select: str, message: str) -> None:
    for option in browser.find_elements("css selector", f"#{select} option"):
        if option.text == message:
            option.click()


@needs_browser
def test_the_grid_is_sorted_and_filtered(browser: Any, page: str) -> None:
    open_page(browser, page)
    assert wait_until(lambda: cells(browser))[0].startswith("c.png: ship · 40 %, label dog")
    # e.png cannot be read: it is the last image in every order.
    for message, first in (("the most confident", "b.png"), ("the least confident", "c.png"), ("by path", "+a.png")):
        chosen(browser, "sort", message)
        assert cells(browser)[0].startswith(first)
        assert cells(browser)[-1].startswith("e.png")
    chosen(browser, "prediction-filter", "ship")
    assert [each.split(":")[0] for each in cells(browser)] == ["c.png", "d.png"]
    assert browser.get_log("browser") == []


@needs_browser
def test_grid_that_changes_at_once_requests_only_its_images(browser: Any, page: str) -> None:
    """Five images are drawn, and then two, before one was requested: positions 2 to 4 are empty then."""
    open_page(browser, page)
    wait_until(lambda: cells(browser))
    browser.execute_script(
        "const show = (select, words) => {"
        " select.value = [...select.options].find((option) => option.text === words).value;"
        " select.dispatchEvent(new Event('change')); };"
        "show(sort, 'by path'); show(document.getElementById('prediction-filter'), 'ship');"
    )
    wait_until(lambda: len(cells(browser)) == 2)
    time.sleep(0.3)
    assert browser.get_log("browser") == []


@needs_browser
def test_a_key_corrects_and_another_undoes(browser: Any, page: str, tmp_path: Path) -> None:
    open_page(browser, page)
    wait_until(lambda: cells(browser))
    browser.execute_script("document.querySelector('#image-grid .cell').focus()")
    press_keys(browser, "\ue007")
    wait_until(lambda: browser.find_element("id", "image-dialog").is_displayed())
    press_keys(browser, "3")
    wait_until(lambda: read_labels(tmp_path)["c.png"] == "ship")
    wait_until(lambda: "Its label is ship." in browser.find_element("id", "prediction").text)
    press_keys(browser, "u")
    wait_until(lambda: read_labels(tmp_path)["c.png"] == "dog")
    press_keys(browser, "\ue014")
    wait_until(lambda: browser.find_element("id", "path").text != "c.png")
    press_keys(browser, "\ue00c")
    wait_until(lambda: not browser.find_element("id", "image-dialog").is_displayed())


@needs_browser
def test_a_cell_of_the_confusion_leads_to_its_images(browser: Any, page: str) -> None:
    open_page(browser, page)
    press_keys(browser, "q")
    button = wait_until(lambda: browser.find_elements("css selector", "[aria-label='label dog, predicted ship: 1']"))[0]
    assert "66.7 % of 3 labels" in browser.find_element("id", "summary").text
    button.click()
    wait_until(lambda: [each.split(":")[0] for each in cells(browser)] == ["c.png"])


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1400, False)])
def test_no_screen_scrolls_sideways(browser: Any, page: str, width: int, dark: bool) -> None:
    open_page(browser, page, width, dark)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    press_keys(browser, "q")
    wait_until(lambda: browser.find_elements("css selector", "#confusion button"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@needs_browser
def test_selected_images_get_one_label_and_lose_it_at_once(browser: Any, page: str, tmp_path: Path) -> None:
    open_page(browser, page)
    wait_until(lambda: cells(browser))
    before = read_labels(tmp_path)
    press_keys(browser, "x")
    for name in ("+a.png", "d.png"):
        browser.find_element("css selector", f"#image-grid .cell[title^='{name}']").click()
    assert browser.find_element("id", "selection-count").text == "2 selected"
    press_keys(browser, "2")
    wait_until(lambda: read_labels(tmp_path) == {**before, "+a.png": "dog", "d.png": "dog"})
    # The server writes the labels before the page has its response.
    wait_until(lambda: not browser.find_element("id", "bulk-labels").is_displayed())
    press_keys(browser, "u")
    wait_until(lambda: read_labels(tmp_path) == before)
    assert browser.get_log("browser") == []


@needs_browser
def test_no_word_of_a_class_name_is_broken(browser: Any, tmp_path: Path) -> None:
    """On a phone: below selected images, of one image, and in the confusion matrix."""
    names = ("automobile", "pneumothorax small", "atelectasis")
    folder(tmp_path, "b.png,automobile\nc.png,atelectasis\n+a.png,atelectasis\n")
    (tmp_path / "classes.txt").write_text("".join(f"{name}\n" for name in names))
    store = open_folder_to_review(tmp_path, names)
    with serve_app(ReviewPage("a model", store, through(classes=names)).app()) as address:
        open_page(browser, address, 390)
        wait_until(lambda: cells(browser))
        press_keys(browser, "x", "a")
        wait_until(lambda: browser.find_element("id", "bulk-labels").is_displayed())
        assert find_broken_words(browser, names) == []
        press_keys(browser, "\ue00c", "x")
        browser.execute_script("document.querySelector('#image-grid .cell').focus()")
        press_keys(browser, "\ue007")
        wait_until(lambda: browser.find_element("id", "image-dialog").is_displayed())
        assert find_broken_words(browser, names) == []
        press_keys(browser, "\ue00c", "q")
        wait_until(lambda: browser.find_elements("css selector", "#confusion button"))
        assert find_broken_words(browser, names) == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390


@needs_browser
def test_radiographs_have_a_dark_surround_and_captions_without_identifiers(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("pydicom")
    from fuzz_targets import make_dicom_file

    header = {"StudyInstanceUID": "1.2.77", "PatientName": "SECRET", "SeriesNumber": 3, "InstanceNumber": 14}
    folder(tmp_path)
    (tmp_path / "d.png").write_bytes(make_dicom_file(np.arange(64, dtype=np.uint16).reshape(8, 8), **header))
    with serve_app(review(tmp_path).app()) as address:
        open_page(browser, address)
        wait_until(lambda: any("study 1, series 3, image 14" in each for each in cells(browser)))
        browser.execute_script("document.querySelector('#image-grid .cell[title*=\"study 1\"]').focus()")
        press_keys(browser, "\ue007")
        wait_until(lambda: "study 1, series 3, image 14" in browser.find_element("id", "path").text)
        color = "return getComputedStyle(document.getElementById('stage')).backgroundColor"
        wait_until(lambda: browser.execute_script(color) == "rgb(11, 13, 16)")
        assert not any(identifier in browser.page_source for identifier in ("1.2.77", "SECRET"))
