"""The page of `halfmoon site label` in a real browser: by keyboard alone, on a phone, with two people at once."""

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import (
    find_broken_words,
    needs_browser,
    open_page,
    press_keys,
    serve_app,
    set_viewport,
    tap,
    wait_until,
)
from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.support.ui import Select

from halfmoon.data.readers.decode import decode_to_shape
from halfmoon.pages.dicom_captions import caption_images
from halfmoon.pages.label import LabelOptions, LabelPage
from halfmoon.pages.label_order import Predictions
from halfmoon.sites.folders import read_site
from halfmoon.sites.folders.labels import NOTES_FILE, LabelEdit, read_labels, write_labels

pytestmark = needs_browser
COUNT = 1000
CLASSES = ("cat", "<b>dog</b>", "ship")


class Through:
    """A background prediction that is complete."""

    def __init__(self, count: int) -> None:
        values = np.random.default_rng(1).random((count, 3)) ** 2
        self.classes = CLASSES
        self.count = count
        self.total = count
        self.error = ""
        self.result = Predictions(values / values.sum(1, keepdims=True), values.astype(np.float32), CLASSES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("site")
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 256, (16, 16), np.uint8)).save(path / "0000.png")
    for n in range(1, COUNT):
        (path / f"{n:04}.png").hardlink_to(path / "0000.png")
    (path / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    return path


@pytest.fixture
def page(folder: Path) -> Iterator[str]:
    (folder / "labels.csv").write_text("path,label\n")
    (folder / ".halfmoon" / "not-sure.csv").unlink(missing_ok=True)
    with serve_app(LabelPage(read_site(folder), (), Through(COUNT), LabelOptions()).app()) as address:  # pyright: ignore
        yield address


def shown(browser: Any) -> str:
    return browser.find_element("id", "path").text


def pressed(browser: Any, *keys: str) -> None:
    """Press keys one by one, and wait for another image after each."""
    for key in keys:
        before = shown(browser)
        press_keys(browser, key)
        wait_until(lambda before=before: shown(browser) != before)


def test_keys_label_undo_skip_and_mark_undecided(browser: Any, page: str, folder: Path) -> None:
    open_page(browser, page)
    assert [each.text for each in browser.find_elements("css selector", "#class-buttons .name")] == list(CLASSES)
    first = shown(browser)
    pressed(browser, "1")
    second = shown(browser)
    pressed(browser, "2")
    assert read_labels(folder) == {first: "cat", second: "<b>dog</b>"}
    assert browser.find_element("id", "progress").text == f"2 of {COUNT:,} labeled"
    pressed(browser, "u")
    assert shown(browser) == second
    assert read_labels(folder) == {first: "cat"}
    pressed(browser, "3", "s")
    third = shown(browser)
    pressed(browser, "n")
    assert read_labels(folder) == {first: "cat", second: "ship"}
    assert read_labels(folder, ".halfmoon/not-sure.csv") == {third: "not sure"}
    pressed(browser, "u")
    assert shown(browser) == third
    assert read_labels(folder, ".halfmoon/not-sure.csv") == {}
    assert browser.get_log("browser") == []


def test_page_keys_show_neighbors_in_a_series(browser: Any, page: str) -> None:
    open_page(browser, page)
    first = shown(browser)
    pressed(browser, "\ue00f")
    assert int(Path(shown(browser)).stem) == int(Path(first).stem) + 1
    browser.find_element("id", "previous-in-folder").click()
    wait_until(lambda: shown(browser) == first)


def test_undo_waits_for_the_pending_label(browser: Any, page: str, folder: Path) -> None:
    open_page(browser, page)
    first = shown(browser)
    browser.execute_script("for (const key of '1u') document.dispatchEvent(new KeyboardEvent('keydown', { key }))")
    wait_until(lambda: browser.find_element("id", "announcement").get_attribute("textContent") == "Undone.")
    assert (shown(browser), read_labels(folder)) == (first, {})


def test_skipped_image_is_last_in_the_grid(browser: Any, page: str) -> None:
    open_page(browser, page)
    first = shown(browser)
    pressed(browser, "s")
    second = shown(browser)
    press_keys(browser, "w")
    cell = "return document.querySelector('#image-grid .cell[data-position=\"0\"]')?.title"
    assert wait_until(lambda: browser.execute_script(cell)).startswith(second)
    press_keys(browser, "\ue010")  # End
    last = f"return document.querySelector('#image-grid .cell[data-position=\"{COUNT - 1}\"]')?.title"
    assert wait_until(lambda: browser.execute_script(last)).startswith(first)


def test_page_shows_the_order(browser: Any, page: str) -> None:
    open_page(browser, page)
    order = Select(browser.find_element("id", "order"))
    assert order.first_selected_option.text == "uncertain and different"
    text = browser.find_element("id", "ranks").text
    assert re.fullmatch(rf"uncertainty 0\.\d\d, rank [\d,]+ of {COUNT:,}", text)
    order.select_by_value("uncertain")
    wait_until(lambda: " rank 1 of" in browser.find_element("id", "ranks").text)
    for rank in range(1, 5):
        assert f"rank {rank} of" in wait_until(lambda: browser.find_element("id", "ranks").text)
        pressed(browser, "s")


def test_tab_and_enter_label(browser: Any, page: str, folder: Path) -> None:
    open_page(browser, page)
    first = shown(browser)
    browser.execute_script("document.querySelectorAll('#class-buttons button')[1].focus()")
    pressed(browser, "\ue007")
    assert read_labels(folder) == {first: "<b>dog</b>"}


def test_suggestions_are_hidden_until_requested(browser: Any, page: str) -> None:
    open_page(browser, page)
    assert not browser.find_element("id", "suggestions").is_selected()
    assert not browser.find_element("id", "suggestion").is_displayed()
    requested = "return performance.getEntriesByType('resource').filter((e) => e.name.includes('/prediction/')).length"
    assert browser.execute_script(requested) == 0
    press_keys(browser, "m")
    wait_until(lambda: browser.find_element("id", "suggestion").text.startswith("The model predicts "))
    assert len(browser.find_elements("css selector", "#class-buttons .suggested")) == 1


def test_zoom_and_contrast_change_the_image(browser: Any, page: str) -> None:
    open_page(browser, page)
    image = browser.find_element("id", "image")
    wide = wait_until(lambda: image.size["width"])
    press_keys(browser, "z")
    assert image.size["width"] == pytest.approx(3 * wide, rel=0.01)
    press_keys(browser, "z", "c")
    assert image.size["width"] == pytest.approx(wide, rel=0.01)
    wait_until(lambda: image.get_attribute("data-preset") == "stretch")


def canvas(browser: Any) -> np.ndarray:
    """Read the drawn pixels of the canvas."""
    data = browser.execute_script("return document.getElementById('image').toDataURL('image/png')")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data.split(",")[1]))).convert("L"))


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A folder of one image of 12 bits: 64 x 64 values from 0 to 4095, and what training sees of it."""
    Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64)).save(tmp_path / "a.png")
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    return tmp_path


def test_shown_pixels_equal_those_of_training_in_any_window(browser: Any, deep: Path) -> None:
    """By its window an image is shown as `decode_to_shape` makes it; center 1500 and width 800 is 1100 to 1900."""
    data = (deep / "a.png").read_bytes()
    with serve_app(LabelPage(read_site(deep), (), None, LabelOptions()).app()) as address:
        open_page(browser, address)
        expected = decode_to_shape(data, "a", 64, 64, 1)[:, :, 0]
        wait_until(lambda: browser.find_element("id", "image").get_attribute("data-preset"))
        assert np.array_equal(canvas(browser), expected)
        for name, value in (("center", "1500"), ("width", "800")):
            field = browser.find_element("id", f"window-{name}")
            field.clear()
            field.send_keys(value)
        window = decode_to_shape(data, "a", 64, 64, 1, window=(1100, 1900))[:, :, 0]
        wait_until(lambda: np.array_equal(canvas(browser), window))
        browser.execute_script("document.activeElement.blur()")
        press_keys(browser, "\ue015")  # down: a higher center is darker
        wait_until(lambda: canvas(browser).mean() < window.mean() - 1)
        stage = browser.find_element("id", "stage")
        before = float(browser.find_element("id", "window-width").get_attribute("value"))
        ActionChains(browser).click_and_hold(stage).move_by_offset(60, 0).release().perform()
        assert float(browser.find_element("id", "window-width").get_attribute("value")) > before
    assert browser.get_log("browser") == []


def test_many_are_labeled_with_one_key_and_undone_at_once(browser: Any, page: str, folder: Path) -> None:
    open_page(browser, page)
    press_keys(browser, "w")

    def cell(n: int):
        return browser.find_element("css selector", f'#image-grid .cell[data-position="{n}"]')

    titles = [wait_until(lambda n=n: cell(n)).get_attribute("title").split(":")[0] for n in range(9)]
    ActionChains(browser).key_down("\ue009").click(cell(0)).key_up("\ue009").perform()
    ActionChains(browser).key_down("\ue008").click(cell(3)).key_up("\ue008").perform()
    assert browser.find_element("id", "selection-count").text == "4 selected"
    press_keys(browser, "2")
    wait_until(lambda: len(read_labels(folder)) == 4)
    assert read_labels(folder) == dict.fromkeys(titles[:4], "<b>dog</b>")
    title = "return document.querySelector('#image-grid .cell[data-position=\"0\"]').title"
    wait_until(lambda: browser.execute_script(title).startswith(titles[4]))
    ActionChains(browser).click_and_hold(cell(0)).move_to_element(cell(2)).release().perform()
    wait_until(lambda: browser.find_element("id", "selection-count").text == "3 selected")
    press_keys(browser, "1")
    wait_until(lambda: browser.find_element("id", "progress").text.startswith("7 of"))
    assert len(read_labels(folder)) == 7
    press_keys(browser, "a")
    assert int(browser.find_element("id", "selection-count").text.split()[0]) > 20
    press_keys(browser, "\ue00c", "u")
    wait_until(lambda: browser.find_element("id", "progress").text.startswith("4 of"))
    assert read_labels(folder) == dict.fromkeys(titles[:4], "<b>dog</b>")
    press_keys(browser, "u")
    wait_until(lambda: read_labels(folder) == {})
    assert browser.get_log("browser") == []


def test_note_is_stored(browser: Any, page: str, folder: Path) -> None:
    open_page(browser, page)
    first = shown(browser)
    browser.find_element("id", "note").send_keys("a pacemaker\ue007")
    wait_until(lambda: read_labels(folder, NOTES_FILE) == {first: "a pacemaker"})
    browser.execute_script("document.activeElement.blur()")
    pressed(browser, "s")
    assert browser.find_element("id", "note").get_attribute("value") == ""
    open_page(browser, page)
    assert shown(browser) != first, "it was skipped, and comes last after a reload as well"
    (folder / NOTES_FILE).unlink()


def test_label_of_another_person_is_not_lost(browser: Any, page: str, folder: Path) -> None:
    open_page(browser, page)
    first = shown(browser)
    # Between the page's look at the file and the key.
    browser.execute_script(
        "const old = fetch;"
        "window.fetch = (path, how) => (path.startsWith('state') ? new Promise(() => {}) : old(path, how))"
    )
    write_labels(folder, LabelEdit(first, "ship"))
    press_keys(browser, "1")
    box = wait_until(lambda: browser.find_elements("css selector", "dialog[open]"))[0]
    assert "its label is now ship. Your label is cat." in box.text
    press_keys(browser, "\ue007")  # keep theirs
    wait_until(lambda: not browser.find_elements("css selector", "dialog[open]"))
    assert read_labels(folder) == {first: "ship"}


def test_another_tab_moves_on_when_its_image_is_labeled(browser: Any, page: str, folder: Path) -> None:
    open_page(browser, page)
    first = shown(browser)
    write_labels(folder, LabelEdit(first, "ship"))
    wait_until(lambda: shown(browser) != first)
    assert browser.find_element("id", "progress").text.startswith("1 of")


def test_grid_of_thousands_has_only_visible_cells(browser: Any, page: str) -> None:
    open_page(browser, page)
    press_keys(browser, "w")
    cells = "return document.querySelectorAll('#image-grid .cell').length"
    wait_until(lambda: browser.execute_script(cells))
    assert browser.execute_script(cells) < 150
    took = browser.execute_async_script(
        "const done = arguments[0]; const grid = document.getElementById('image-grid'); const began = performance.now();"
        "let n = 0; const step = () => { grid.scrollTop = (++n * grid.scrollHeight) / 30;"
        "n < 30 ? requestAnimationFrame(step) : done((performance.now() - began) / 30) }; step()"
    )
    assert took < 200, "a frame takes too long"
    assert browser.execute_script(cells) < 150
    last = "return Math.max(...[...document.querySelectorAll('#image-grid .cell')].map((each) => Number(each.dataset.position)))"
    assert browser.execute_script(last) == COUNT - 1
    press_keys(browser, "\ue011")  # Home
    wait_until(lambda: browser.execute_script("return document.activeElement.dataset.position") == "0")
    press_keys(browser, "\ue014", "\ue007")
    wait_until(lambda: browser.find_element("id", "single-view").is_displayed())


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1400, True)])
def test_page_fits_a_phone_and_dark_mode(browser: Any, page: str, width: int, dark: bool) -> None:
    open_page(browser, page, width, dark)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, back[4:-1].split(","))) < 200) == dark
    small = browser.execute_script(
        "return [...document.querySelectorAll('#class-buttons button, .actions button')]"
        ".filter((each) => each.getBoundingClientRect().height < 34).length"
    )
    assert small == 0


def test_every_class_can_be_reached_on_a_phone(browser: Any, tmp_path: Path) -> None:
    """The bar with Undo and Skip remains visible, and covers no button that is scrolled to."""
    Image.new("L", (16, 16), 90).save(tmp_path / "a.png")
    (tmp_path / "classes.txt").write_text("".join(f"class {n}\n" for n in range(26)))
    with serve_app(LabelPage(read_site(tmp_path), (), None, LabelOptions()).app()) as address:
        open_page(browser, address, 390)
        hidden = browser.execute_script(
            "return [...document.querySelectorAll('#class-buttons button')].filter((each) => {"
            " each.focus(); const box = each.getBoundingClientRect();"
            " return !each.contains(document.elementFromPoint(box.x + box.width / 2, box.y + box.height - 3)); }).length"
        )
        assert hidden == 0
        stage, first = (browser.find_element("css selector", name).rect for name in ("#stage", "#class-buttons button"))
        assert first["y"] - (stage["y"] + stage["height"]) < 60, "something is between the image and its classes"


TWELVE = (
    *["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
    "pneumothorax small",
    "atelectasis",
)


@pytest.fixture
def twelve(tmp_path: Path) -> Path:
    """A folder of 13 images and 12 classes, of which some have many labels and others few."""
    for n in range(13):
        Image.new("RGB", (16, 16), (10 * n, 90, 90)).save(tmp_path / f"{n:02}.png")
    (tmp_path / "classes.txt").write_text("".join(f"{name}\n" for name in TWELVE))
    return tmp_path


def test_each_of_twelve_classes_labels_by_a_tap_on_a_phone(browser: Any, twelve: Path) -> None:
    with serve_app(LabelPage(read_site(twelve), (), None, LabelOptions()).app()) as address:
        open_page(browser, address, 390)
        set_viewport(browser, 390, 844)
        given = {}
        for n, name in enumerate(TWELVE):
            image = shown(browser)
            tap(browser, browser.find_elements("css selector", "#class-buttons button")[n])
            wait_until(lambda before=image: shown(browser) != before)
            given[image] = name
        assert read_labels(twelve) == given
        assert browser.get_log("browser") == []


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_no_word_of_a_class_name_is_broken(browser: Any, twelve: Path, width: int, height: int) -> None:
    for n in range(13, 40):
        (twelve / f"{n}.png").hardlink_to(twelve / "00.png")
    # The other classes have few labels, which takes room beside their names.
    write_labels(twelve, *[LabelEdit(f"{n:02}.png", TWELVE[1]) for n in range(30)])
    with serve_app(LabelPage(read_site(twelve), (), None, LabelOptions()).app()) as address:
        open_page(browser, address, width)
        set_viewport(browser, width, height)
        assert len(browser.find_elements("css selector", "#class-buttons .rare")) == 11
        assert find_broken_words(browser, TWELVE) == []
        press_keys(browser, "w", "x", "a")  # all images on the screen are selected
        wait_until(lambda: browser.find_element("id", "bulk-class-buttons").is_displayed())
        assert find_broken_words(browser, TWELVE) == []
        style = "document.getElementById('bulk-class-buttons').style"
        browser.execute_script(
            f"{style}.gridTemplateColumns = 'repeat(6, 60px)'; {style}.setProperty('width', '390px')"
        )
        browser.execute_script("document.querySelectorAll('.name').forEach((each) => { each.style.maxWidth = '60px' })")
        assert "pneumothorax" in find_broken_words(browser, TWELVE), "a broken word is noticed"


def test_unreadable_images_are_last(browser: Any, tmp_path: Path) -> None:
    """Whatever image is first in the random order, one of the readable ones is shown."""
    for n in range(4):
        (tmp_path / f"{n}.png").write_bytes(b"no image")
    Image.new("L", (16, 16), 90).save(tmp_path / "9.png")
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    with serve_app(LabelPage(read_site(tmp_path), (), None, LabelOptions()).app()) as address:
        open_page(browser, address)
        wait_until(lambda: shown(browser) == "9.png")
        press_keys(browser, "w")
        first = "return document.querySelector('#image-grid .cell[data-position=\"0\"]')?.title ?? ''"
        wait_until(lambda: browser.execute_script(first).startswith("9.png"))
        press_keys(browser, "w")
        pressed(browser, "1")
        assert browser.find_element("css selector", "#stage.unreadable").is_displayed()
    browser.get_log("browser")


def test_radiographs_have_a_dark_surround_and_captions_without_identifiers(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("pydicom")
    from fuzz_targets import make_dicom_file

    header = {"StudyInstanceUID": "1.2.77", "PatientName": "SECRET", "SeriesNumber": 3, "InstanceNumber": 14}
    (tmp_path / "IM01").write_bytes(make_dicom_file(np.arange(64, dtype=np.uint16).reshape(8, 8), **header))
    Image.new("RGB", (16, 16), (200, 10, 10)).save(tmp_path / "z.png")
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    with serve_app(LabelPage(read_site(tmp_path), (), None, LabelOptions(seed=0)).app()) as address:
        open_page(browser, address)
        seen = {}
        for _ in range(2):
            name = wait_until(lambda: shown(browser))
            wait_until(lambda: browser.execute_script("return document.querySelector('#image').dataset.preset"))
            if "IM01" in name:
                name = wait_until(lambda: "study" in shown(browser) and shown(browser))
            seen[name] = browser.execute_script("return getComputedStyle(stage).backgroundColor")
            pressed(browser, "s")
        assert set(seen) == {"study 1, series 3, image 14 (IM01)", "z.png"}
        assert seen["study 1, series 3, image 14 (IM01)"] == "rgb(11, 13, 16)"
        assert seen["z.png"] != "rgb(11, 13, 16)"
        press_keys(browser, "w")
        color = (
            "const cell = [...document.querySelectorAll('#image-grid .cell')].find((each) => each.title.includes(arguments[0]));"
            "const image = cell?.querySelector('img'); return image?.complete && getComputedStyle(image).backgroundColor"
        )
        wait_until(lambda: browser.execute_script(color, "study 1") == "rgb(11, 13, 16)")
        wait_until(lambda: browser.execute_script(color, "z.png") not in (None, False, "rgb(11, 13, 16)"))
        fetch_again = (
            "return Promise.all(performance.getEntriesByType('resource').filter((each) => each.initiatorType === 'fetch')"
            ".map((each) => fetch(each.name).then((reply) => reply.text())))"
        )
        received = [*browser.execute_script(fetch_again), browser.page_source]
        assert any("study 1" in text for text in received[:-1])
        assert not any(identifier in text for text in received for identifier in ("1.2.77", "SECRET"))


def test_captions_number_studies_and_leave_long_numbers_out(tmp_path: Path) -> None:
    """Two studies by path; a series number of 14 digits is a time stamp of the device, so the series is counted."""
    pytest.importorskip("pydicom")
    from fuzz_targets import make_dicom_file

    pixels = np.arange(64, dtype=np.uint16).reshape(8, 8)
    headers = [
        {"StudyInstanceUID": "1.2.9", "SeriesInstanceUID": "1.5", "SeriesNumber": 20261127213000, "InstanceNumber": 2},
        {"StudyInstanceUID": "1.2.9", "SeriesInstanceUID": "1.6"},
        {"StudyInstanceUID": "1.2.1", "SeriesInstanceUID": "1.7", "SeriesNumber": 4, "InstanceNumber": 1},
    ]
    for n, header in enumerate(headers):
        (tmp_path / f"{n}").write_bytes(make_dicom_file(pixels, **header))
    (tmp_path / "3.png").write_bytes(b"no image")
    found = caption_images(tmp_path, ["0", "1", "2", "3.png"])
    assert found == {0: "study 1, series 1, image 2", 1: "study 1, series 2", 2: "study 2, series 4, image 1"}


def test_page_reports_a_stopped_server(browser: Any, folder: Path) -> None:
    with serve_app(LabelPage(read_site(folder), (), None, LabelOptions()).app()) as address:
        open_page(browser, address)
    press_keys(browser, "1")
    notice = browser.find_element("id", "notice")
    wait_until(lambda: "no longer runs" in notice.text)
    browser.get_log("browser")


def test_page_prompts_once_for_a_name(browser: Any, folder: Path) -> None:
    (folder / "labels.csv").write_text("path,label\n")
    with serve_app(LabelPage(read_site(folder), (), None, LabelOptions(by="")).app()) as address:
        open_page(browser, address)
        box = browser.find_element("css selector", "dialog[open] input")
        box.send_keys("Ada\ue007")
        wait_until(lambda: not browser.find_elements("css selector", "dialog[open]"))
        first = shown(browser)
        pressed(browser, "1")
    (line,) = (folder / "labels.csv").read_text().splitlines()[1:]
    assert line.startswith(f"{first},cat,Ada,20")
