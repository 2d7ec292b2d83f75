"""The page of `halfmoon report` in a real browser: charts, legends, choices, tooltips, a phone, and paper."""

import base64
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browsers import needs_browser, start_chromium
from report_folders import (
    METHODS,
    compute_accuracy,
    make_run_entry,
    make_split_summary,
    make_sweep,
    record_checksums,
    write_line_sweep,
    write_run,
    write_sweep,
    write_sweep_file,
)

from halfmoon.report.gather import gather_studies
from halfmoon.report.page import render_html

pytestmark = needs_browser
ODD = "<b onmouseover=alert(1)>cat</b>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with start_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page of a table with two columns, of lines along gamma, and of splits alone."""
    root = tmp_path_factory.mktemp("page")
    table = write_sweep(root, names=[ODD, "dog", "ship"])
    lines = write_line_sweep(root)
    single = make_sweep(kind="splits", scale=None)
    done = write_run(root / "s", 1, 0, split=make_split_summary(5, ["a", "b"], server=True))
    single["cells"] = [{"at": {"setting": "iid-iid", "method": "fixmatch"}, "runs": [make_run_entry(done, "../s")]}]
    path = root / "page.html"
    path.write_text(
        render_html(gather_studies([table, lines, write_sweep_file(root / "splits", single)])), encoding="utf-8"
    )
    return path


def opened(browser: Any, page: Path, width: int = 1200) -> None:
    """Load the page at a width, and wait until its charts are drawn."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    settle(browser)


def settle(browser: Any) -> None:
    """Wait two frames: sizes are observed after the first."""
    browser.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
    )


def count(browser: Any, selector: str) -> int:
    return len(browser.find_elements("css selector", selector))


def group(number: int, study: int = 0) -> str:
    return f'[data-study="{study}"] [data-group="{number}"]'


def test_page_opens_without_console_messages(browser: Any, page: Path) -> None:
    opened(browser, page)
    assert browser.get_log("browser") == []
    assert browser.title == "Toy, Table 1 · Toy, Figure 2 · Toy, Table 1 · halfmoon"


def test_charts_show_the_data(browser: Any, page: Path) -> None:
    """Three methods, two with pseudo-labels: accuracy, two divergences and costs have 3 lines, four others have 2."""
    opened(browser, page)
    lines = [count(browser, f"{group(0)} [data-charts={name}] .line path") for name in ("learning", "classes", "costs")]
    assert lines == [3 + 4 * 2, 2 * 3, 3]
    assert count(browser, f"{group(0)} .band path") == sum(lines)  # two seeds each
    assert count(browser, f"{group(0)} .cell rect") == 6  # entries of the confusion matrix that are not zero
    # Three classes and three methods; then three classes and four shares.
    markers = f"{group(0)} [data-charts=classes] figure:nth-of-type(%d) .marker > *"
    assert count(browser, markers % 3) == 9
    assert count(browser, markers % 4) == 12
    # Client k has (k + c + shift) % 4 of class c: three zeros among twelve, on both sides.
    bubbles = '[data-study="0"] [data-splits] figure:nth-of-type(%d) .bubble circle'
    assert [count(browser, bubbles % n) for n in (1, 2)] == [18, 18]
    # Five clients, two classes: zeros at (k, c) = (0, 0), (3, 1), (4, 0); and a server with two.
    assert count(browser, '[data-study="2"] .bubble.labeled circle') == 10 - 3 + 2
    assert count(browser, '[data-study="2"] .bubble.unlabeled circle') == 10 - 3
    assert count(browser, '[data-study="2"] table') == 0
    # Along gamma: a line a method, and three published points, each with its deviation.
    assert count(browser, "[data-option-charts] .line path") == 3
    assert count(browser, "[data-option-charts] .published > *") == 3
    for image in browser.find_elements("css selector", "svg[role=img]"):
        assert len(image.get_attribute("aria-label")) > 20


def test_bubbles_have_areas_in_proportion(browser: Any, page: Path) -> None:
    """Counts 3 and 1 on one panel: radii as the square root of 3."""
    opened(browser, page)
    found = browser.find_elements(
        "css selector", '[data-study="0"] [data-splits] figure:nth-of-type(1) .labeled circle'
    )
    radii = sorted({float(circle.get_attribute("r")) for circle in found})
    assert len(radii) == 3
    assert radii[2] / radii[0] == pytest.approx(3**0.5, rel=0.01)


def test_a_click_in_a_legend_hides_a_line_in_all_charts_of_its_group(browser: Any, page: Path) -> None:
    opened(browser, page)
    titled = f'{group(0)} :is(.line, .marker) [data-part="FedDure"]'
    # Lines of five learning curves, two divergences and the costs; a dot for each of three classes.
    assert count(browser, titled) == 8 + 3
    others = count(browser, f"{group(0)} .line path")
    button = browser.find_element("css selector", f"{group(0)} [data-charts=learning]").find_element(
        "xpath", "preceding-sibling::div[@role='group']/button[normalize-space()='FedDure']"
    )
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert count(browser, titled) == 0
    assert count(browser, f"{group(0)} .line path") == others - 8
    pressed = f"{group(0)} .legend button[aria-pressed=false]"
    assert count(browser, pressed) == 3  # every legend of the group says it
    assert count(browser, '[data-study="1"] .line [data-part="FedDure"]') > 0
    browser.find_elements("css selector", pressed)[1].click()
    assert count(browser, titled) == 8 + 3


def hover(browser: Any, selector: str, across: float, broadcast: float = 0.5) -> str:
    """Move the mouse over a chart, in shares of its size, and return the text of the tooltip."""
    target = browser.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", target)
    frame = browser.execute_script(
        "const r = arguments[0].getBoundingClientRect(); return [r.x, r.y, r.width, r.height]", target
    )
    position = {"x": frame[0] + across * frame[2], "y": frame[1] + broadcast * frame[3]}
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", **position})
    settle(browser)
    tips = browser.find_elements("css selector", "#tooltip:not([hidden])")
    return tips[0].text if tips else ""


def test_hovering_shows_values(browser: Any, page: Path) -> None:
    """At the right edge stands round 12 with all methods, the best first; beyond the charts the tooltip goes."""
    opened(browser, page)
    messages = hover(browser, f"{group(0)} [data-charts=learning] svg[role=img]", 0.97).splitlines()
    assert messages[0] == "round 12"
    assert messages[1::2] == [*reversed(METHODS.values())]
    assert messages[2] == "77.97 (77.47 to 78.47)"
    assert count(browser, f"{group(0)} .guide line") == 1
    confusion = hover(browser, f"{group(0)} [data-charts=confusion] svg[role=img]", 0.5, 0.1)
    assert confusion.startswith(f"true: {ODD}")
    assert "predicted: " in confusion
    assert "client" in hover(browser, '[data-study="0"] [data-splits] svg[role=img]', 0.5, 0.3)
    assert "dirichlet_alpha 1\n" in hover(browser, "[data-option-charts] svg[role=img]", 0.98)
    assert "FedDure, published\n62.00 ± 1.00" in hover(browser, "[data-option-charts] svg[role=img]", 0.98)
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 2, "y": 2})
    settle(browser)
    assert count(browser, "#tooltip:not([hidden])") == 0
    assert browser.get_log("browser") == []


def test_arrow_keys_walk_along_the_rounds(browser: Any, page: Path) -> None:
    opened(browser, page)
    chart = browser.find_element("css selector", f"{group(0)} [data-charts=learning] svg[role=img]")
    browser.execute_script("arguments[0].focus()", chart)
    rounds = []
    for key in ("\ue014", "\ue014", "\ue012"):
        chart.send_keys(key)
        rounds.append(browser.find_element("css selector", "#tooltip b").text)
    assert rounds == ["round 2", "round 4", "round 2"]
    chart.send_keys("\ue00c")  # Escape
    assert count(browser, "#tooltip:not([hidden])") == 0
    assert count(browser, f"{group(0)} .guide line") == 0


def test_arrow_keys_walk_along_every_kind_of_chart(browser: Any, page: Path) -> None:
    """The first stop of each chart, and the one after it: cells without images are left out."""
    opened(browser, page)
    stops = {}
    for name, selector in {
        "classes": f"{group(0)} [data-charts=classes] figure:nth-of-type(3)",
        "confusion": f"{group(0)} [data-charts=confusion]",
        "split": '[data-study="0"] [data-splits]',
    }.items():
        chart = browser.find_element("css selector", f"{selector} svg[role=img]")
        browser.execute_script("arguments[0].focus()", chart)
        stops[name] = []
        for _ in range(2):
            chart.send_keys("\ue014")
            settle(browser)
            stops[name].append(browser.find_element("css selector", "#tooltip").text.split("\n")[:3])
    assert [lines[0] for lines in stops["classes"]] == [ODD, "dog"]
    matrix = [[f"true: {ODD}", "predicted: " + ODD, "80 (80.0 %)"], [f"true: {ODD}", "predicted: dog", "20 (20.0 %)"]]
    assert stops["confusion"] == matrix
    assert [lines[0].split(", ")[0] for lines in stops["split"]] == ["client 0", "client 0"]


def choose(browser: Any, selector: str, message: str) -> None:
    """Choose an option by its text, as a user does."""
    select = browser.find_element("css selector", selector)
    next(option for option in select.find_elements("tag name", "option") if option.text == message).click()
    settle(browser)


def test_the_axis_of_costs_can_be_chosen(browser: Any, page: Path) -> None:
    """At 12 rounds: 60 steps, 3,600 images for the dearest method, 18 MB, 6 seconds."""
    opened(browser, page)
    chart = f"{group(0)} [data-charts=costs]"
    label = f"{chart} [data-part='x-axis label'] text"
    ticks = f"{chart} [data-part='x-axis tick label'] text"
    assert browser.find_element("css selector", label).text == "labeled steps"
    for message, maximum in (("forward passes, images", 3600), ("sent, MB", 18), ("seconds", 6), ("round", 12)):
        choose(browser, f"{chart} select", message)
        assert browser.find_element("css selector", label).text == message
        shown = [float(each.text.replace(",", "")) for each in browser.find_elements("css selector", ticks)]
        assert 0.6 * maximum < max(shown) <= maximum
        assert count(browser, f"{chart} .line path") == 3


def test_a_column_and_a_matrix_can_be_chosen(browser: Any, page: Path) -> None:
    opened(browser, page)
    shown = f"{group(1)}:not([hidden])"
    assert (count(browser, f"{group(0)}:not([hidden])"), count(browser, shown)) == (1, 0)
    choose(browser, '[data-study="0"] [data-choose=group]', "DIR-DIR")
    assert (count(browser, f"{group(0)}:not([hidden])"), count(browser, shown)) == (0, 1)
    assert count(browser, f"{group(1)} .line path") == 20
    matrix = f"{group(1)} [data-charts=confusion] svg[role=img]"
    assert "FedDure" in browser.find_element("css selector", matrix).get_attribute("aria-label")
    choose(browser, f"{group(1)} [data-choose=confusion]", "FedAvg + FixMatch")
    assert "FedAvg + FixMatch: 80.0 %" in browser.find_element("css selector", matrix).get_attribute("aria-label")


def test_missing_charts_of_older_runs_leave_no_space(browser: Any, page: Path) -> None:
    opened(browser, page)
    titles = [each.text for each in browser.find_elements("css selector", f"{group(0, 1)} h2") if each.is_displayed()]
    assert "Learning curves" in titles
    assert "Confusion" not in titles
    assert not browser.find_element("css selector", '[data-study="1"] [data-splits]').is_displayed()


@pytest.mark.parametrize("width", [380, 768, 1200, 1600])
def test_charts_fill_every_screen_and_none_scrolls_sideways(browser: Any, page: Path, width: int) -> None:
    opened(browser, page, width)
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    wide = browser.execute_script(
        "return [...document.querySelectorAll('svg[role=img], h1, h2, p, figcaption')]"
        ".filter((each) => each.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert wide == 0
    short = browser.execute_script(
        "return [...document.querySelectorAll('.charts')].flatMap((host) => { const ends = {};"
        "for (const each of host.children) { const box = each.getBoundingClientRect();"
        "if (box.width) ends[Math.round(box.bottom)] = Math.max(ends[Math.round(box.bottom)] ?? 0, box.right); }"
        "return Object.values(ends).map((right) => host.getBoundingClientRect().right - right); }).filter((n) => n > 1)"
    )
    assert short == []


def test_scale_remains_visible(browser: Any, page: Path) -> None:
    opened(browser, page, 380)
    to = "const a = document.querySelector('.study'); scrollTo(0, a.offsetTop + arguments[0] * a.offsetHeight)"
    for share in (0.1, 0.3, 0.5):
        browser.execute_script(to, share)
        top = browser.execute_script("return document.querySelector('.banner').getBoundingClientRect().top")
        assert 0 <= top < 300


def test_print_has_every_column(browser: Any, page: Path) -> None:
    """The print has the charts of the column that is not chosen, too, and afterwards the screen is as before."""
    opened(browser, page)
    browser.execute_script(
        "const lines = arguments[0]; const note = () => { window.kept = document.querySelectorAll(lines).length };"
        "addEventListener('beforeprint', note)",
        f"{group(1)} .line path",
    )
    made = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert base64.b64decode(made["data"]).startswith(b"%PDF")
    assert browser.execute_script("return window.kept") == 20
    assert count(browser, f"{group(1)}:not([hidden])") == 0


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """Write the page of three runs with accuracies at clients, used pseudo-labels, and weights of pseudo-labels."""
    for method, key in enumerate(METHODS):
        folder = tmp_path / "runs" / key
        # FixMatch is the winner of the test set, FedDure has all labels by its title.
        title = "FedAvg-SL (all labels)" if key == "feddure" else ""
        summary = write_run(folder, method, 0, title=title)
        each = {"0": 0.5, "1": 0.7, "2": 0.9}
        summary["client_accuracy"] = {"clients": 3, "mean": 0.7, "deviation": 0.2, "worst": 0.5, "each": each}
        summary["pseudo_labels"] = {"used": 0.25} if method else {"used": None}
        summary["confusion"][0][0] = 80 - method  # tells the matrices apart
        (folder / "summary.json").write_text(json.dumps(summary))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            if row["pseudo"]:
                row["pseudo"]["auc_confidence"] = 0.8
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        record_checksums(folder)
    path = tmp_path / "page.html"
    path.write_text(render_html(gather_studies([tmp_path / "runs"])), encoding="utf-8")
    return path


def test_charts_are_in_two_columns_and_none_is_alone(browser: Any, comparison: Path) -> None:
    """Five learning curves: the accuracy has a row, the others are two by two."""
    opened(browser, comparison, 1280)
    script = (
        "return [...document.querySelector('[data-charts=learning]').children].map((figure) => {"
        "const box = figure.getBoundingClientRect(); return [Math.round(box.x), Math.round(box.width)]; })"
    )
    first, *others = browser.execute_script(script)
    assert first == [24, 1232]
    assert others == [[24, 602], [654, 602]] * 2
    opened(browser, comparison, 390)
    assert {tuple(box) for box in browser.execute_script(script)} == {(14, 362)}


def test_a_printed_caption_names_what_was_chosen(browser: Any, comparison: Path) -> None:
    """The axis of the chart of costs, and the method of the confusion matrix: on paper there is no menu."""
    opened(browser, comparison)
    choose(browser, "[data-choose=axis]", "sent, MB")
    shown = (
        "return [...document.querySelectorAll('.selected-option')].map((each) => each.firstChild.textContent + "
        "getComputedStyle(each, '::after').content + getComputedStyle(each.querySelector('select')).display)"
    )
    assert "Test accuracy, %, against noneinline-block" in browser.execute_script(shown)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        printed = browser.execute_script(shown)
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert 'Test accuracy, %, against "sent, MB"none' in printed
    assert 'Confusion of the final model: "FedAvg + FixMatch"none' in printed


def test_images_of_unknown_classes_are_a_row(browser: Any, tmp_path: Path) -> None:
    """All unlabeled images of two clients, and two labeled images of the second client, are of no known class."""
    split = make_split_summary(2, ["cat", "dog"])
    for client, labeled, unlabeled in zip(split["each"], (1, 5), (40, 10), strict=True):
        client |= {"labeled": labeled, "unlabeled": unlabeled, "unlabeled_classes": [0, 0]}
    split["counts"] |= {"labeled": 6, "unlabeled": 50}
    write_run(tmp_path / "run", 1, 0, split=split)
    path = tmp_path / "page.html"
    path.write_text(render_html(gather_studies([tmp_path / "run"])), encoding="utf-8")
    opened(browser, path, 390)
    assert browser.get_log("browser") == []
    names = [each.text for each in browser.find_elements("css selector", "[data-splits] svg[role=img] text")]
    names = [name for name in names if name not in ("0", "1", "client")]  # those of the axis of clients
    assert names[:4] == ["labeled: 6 images, largest bubble 2", "cat", "dog", "unknown"]
    assert names[4:] == ["unlabeled: 50 images, largest bubble 40", "unknown"]
    found = browser.find_elements("css selector", ".unlabeled circle")
    radii = [float(circle.get_attribute("r")) for circle in found]
    assert radii[0] / radii[1] == pytest.approx(2, rel=0.01)
    rows = list(csv.reader(io.StringIO(saved(browser, "[data-split-charts] [data-save=CSV]"))))
    # Client 1 has 1 and 2 labeled images of the classes, see `make_split_summary`, and 5 in all.
    assert [row[3] for row in rows if row[:2] == ["labeled", "1"]] == ["1", "2", "2"]
    assert [row[1:] for row in rows if row[0] == "unlabeled"] == [["0", "unknown", "40"], ["1", "unknown", "10"]]


def test_table_highlights_baseline_best_and_upper_bound(browser: Any, comparison: Path) -> None:
    """Test accuracies are 62.3, 69.9 and 77.4 %: gains over labels only, 25 % of the pseudo-labels used."""
    opened(browser, comparison)
    rows = [each.text for each in browser.find_elements("css selector", ".group tbody tr")]
    floor, ceiling, best = rows[:3]
    assert floor.startswith("FedAvg (labeled only) baseline 1")
    assert ceiling.startswith("FedAvg-SL (all labels) upper bound 1")
    assert best.startswith("FedAvg + FixMatch best 1")
    gain = 100 * (compute_accuracy(1, 0, 12) - compute_accuracy(0, 0, 12))
    assert best.endswith(f"+{gain:.2f} 25.00 70.00 20.00 50.00")


def test_the_confusion_of_the_winner_is_shown_first(browser: Any, comparison: Path) -> None:
    opened(browser, comparison)
    matrix = browser.find_element("css selector", "[data-charts=confusion] svg[role=img]")
    assert "FedAvg + FixMatch" in matrix.get_attribute("aria-label")


def test_quantities_from_0_to_1_fill_their_chart(browser: Any, comparison: Path) -> None:
    """An AUC of 0.8 was drawn on an axis to 4, which is the smallest range of percentages."""
    opened(browser, comparison)
    texts = browser.find_elements("css selector", "[data-charts=regulators] figure:first-of-type svg text")
    ticks = [float(each.text) for each in texts if each.text.replace(".", "").isdigit()]
    assert ticks
    assert 0.7 < max(tick for tick in ticks if tick < 2) <= 1


SAVED = (
    "const [button, done] = arguments; const made = URL.createObjectURL;"
    "URL.createObjectURL = (blob) => { URL.createObjectURL = made; blob.text().then(done); return made.call(URL, blob); };"
    "(typeof button === 'string' ? document.querySelector(button) : button).click();"
)


def saved(browser: Any, selector: str) -> str:
    return browser.execute_async_script(SAVED, selector)


def test_figures_are_saved_as_csv_and_svg(browser: Any, comparison: Path) -> None:
    opened(browser, comparison)
    clients = "[data-charts=clients]"
    assert count(browser, f"{clients} .client circle") == 9
    rows = list(csv.reader(io.StringIO(saved(browser, f"{clients} [data-save=CSV]"))))
    assert rows[0] == ["line", "client", "accuracy"]
    assert rows[1:5] == [[METHODS["fedavg"], *pair] for pair in (("0", "50"), ("1", "70"), ("2", "90"), ("mean", "70"))]
    curve = list(csv.reader(io.StringIO(saved(browser, "[data-charts=learning] [data-save=CSV]"))))
    assert curve[0] == ["line", "round", "mean", "low", "high"]
    assert float(curve[1][2]) == pytest.approx(100 * compute_accuracy(0, 0, 2))
    for name in ("learning", "clients", "classes", "confusion", "costs"):
        root = ElementTree.fromstring(saved(browser, f"[data-charts={name}] [data-save=SVG]"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        text = ElementTree.tostring(root, encoding="unicode")
        assert "var(" not in text, "variables and color-mix are known to browsers only"
        assert "color-mix" not in text
    curves = saved(browser, "[data-charts=learning] [data-save=SVG]")
    assert all(title in curves for title in ("FedAvg (labeled only)", "FedAvg-SL (all labels)")), "no legend"
    everything = len(browser.find_elements("css selector", "[data-save=SVG]"))
    assert everything == len(browser.find_elements("css selector", "figure"))


def test_every_saved_figure_has_the_numbers_of_the_runs(browser: Any, comparison: Path) -> None:
    """All CSV files against the files of the runs; one seed a method, so mean, lowest and highest are equal."""
    opened(browser, comparison)
    runs = {METHODS[key]: comparison.parent / "runs" / key for key in METHODS}
    runs["FedAvg-SL (all labels)"] = runs.pop("FedDure")
    metrics = {}
    summaries = {}
    for title, folder in runs.items():
        metrics[title] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        summaries[title] = json.loads((folder / "summary.json").read_text())
    buttons = browser.find_elements("css selector", "[data-save=CSV]")
    found = {}
    for button in buttons:
        rows = list(csv.reader(io.StringIO(browser.execute_async_script(SAVED, button))))
        found[button.get_attribute("aria-label").removeprefix("Save as CSV: ")] = rows

    def curve(group: str, name: str, factor: float = 100) -> list[tuple[str, str, float]]:
        points = []
        for title, rows in metrics.items():
            for row in rows:
                if row.get(group) and row[group].get(name) is not None:
                    points.append((title, str(row["round"]), factor * row[group][name]))
        return points

    expected = {
        "Test accuracy, %": curve("test", "accuracy"),
        "Correct pseudo-labels, %": curve("pseudo", "accuracy"),
        "Correct among those above the threshold, %": curve("pseudo", "accuracy_above"),
        "Pseudo-labels above the threshold, %": curve("pseudo", "share_above"),
        "Pseudo-labels that were used, %": curve("pseudo", "share_used"),
        "AUC of the confidence for correct pseudo-labels": curve("pseudo", "auc_confidence", 1),
        "Divergence of class-wise accuracy from APP-U": curve("prior", "js_app_u", 1),
        "Divergence of class-wise accuracy from the labeled mix": curve("prior", "js_labeled", 1),
    }
    for title, points in expected.items():
        rows = found.pop(title)
        assert rows[0] == ["line", "round", "mean", "low", "high"]
        assert sorted((line, at) for line, at, *_ in rows[1:]) == sorted((line, at) for line, at, _ in points)
        values = {(line, at): value for line, at, value in points}
        for line, at, mean, low, high in rows[1:]:
            assert [float(each) for each in (mean, low, high)] == pytest.approx([values[line, at]] * 3, rel=1e-5), title
    against = found.pop("Test accuracy, %, against labeled steps")
    assert against[0] == ["line", "labeled steps", "mean", "low", "high"]
    steps = {(title, row["cost"]["labeled_steps"]) for title, rows in metrics.items() for row in rows if "test" in row}
    assert {(line, int(at)) for line, at, *_ in against[1:]} == steps
    classes = found.pop("Class-wise accuracy of the final model, %")
    shares = {title: rows[-1]["test"]["per_class"] for title, rows in metrics.items()}
    names = ("cat", "dog", "ship")
    for line, name, mean, *_ in classes[1:]:
        assert float(mean) == pytest.approx(100 * shares[line][names.index(name)], rel=1e-5)
    assert len(classes) == 1 + 3 * 3
    prior = found.pop("Class shares at the end, %, FedAvg + FixMatch")
    ends = metrics["FedAvg + FixMatch"][-1]["prior"]
    keys = {"class-wise accuracy, its share": "accuracy", "APP-U": "app_u", "labeled": "labeled"}
    keys["unlabeled (true)"] = "unlabeled"
    for line, name, mean, *_ in prior[1:]:
        assert float(mean) == pytest.approx(100 * ends[keys[line]][names.index(name)], rel=1e-5)
    confusion = found.pop("Confusion of the final model, FedAvg + FixMatch")
    matrix = summaries["FedAvg + FixMatch"]["confusion"]
    counts = [["true class", "predicted class", "images"]]
    counts += [[t, p, str(matrix[n][m])] for n, t in enumerate(names) for m, p in enumerate(names)]
    assert confusion == counts
    clients = found.pop("Accuracy at the clients, %")
    ends_of_clients = [["0", "50"], ["1", "70"], ["2", "90"], ["mean", "70"], ["standard deviation", "20"]]
    ends_of_clients.append(["worst tenth", "50"])
    # The order of the methods is that of the table.
    assert [row[1:] for row in clients[1:]] == ends_of_clients * 3
    split = json.loads((runs["FedAvg + FixMatch"] / "split.json").read_text())
    (rows,) = found.values()  # nothing else can be saved but the split
    for kind, client, name, images in rows[1:]:
        assert int(images) == split["each"][int(client)][f"{kind}_classes"][names.index(name)]


def test_every_saved_figure_opens_alone(browser: Any, comparison: Path, tmp_path: Path) -> None:
    """An SVG file names its font and colors itself, draws as many shapes as the page, and fits into its frame."""
    opened(browser, comparison)
    files = []
    for button in browser.find_elements("css selector", "[data-save=SVG]"):
        picture = browser.execute_script("return arguments[0].closest('figure').querySelector('svg[role=img]')", button)
        drawn = len(picture.find_elements("css selector", "path, circle, rect"))
        files.append((browser.execute_async_script(SAVED, button), drawn))
    assert len(files) == count(browser, "figure") > 10
    for number, (text, drawn) in enumerate(files):
        for missing in ("var(", "currentColor", "color-mix", 'class="guide', "http://localhost"):
            assert missing not in text, missing
        assert "font-family" in text
        path = tmp_path / f"{number}.svg"
        path.write_text(text, encoding="utf-8")
        browser.get(path.as_uri())
        assert browser.get_log("browser") == []
        shapes = "return document.querySelectorAll('path, circle, rect').length"
        assert browser.execute_script(shapes) >= drawn
        family, color = browser.execute_script(
            "const text = document.querySelector('text'); const style = getComputedStyle(text);"
            "return [style.fontFamily, style.fill]"
        )
        assert "sans-serif" in family
        assert color != "rgb(0, 0, 0)"
        outside = browser.execute_script(
            "const all = document.documentElement.getBoundingClientRect();"
            "return [...document.querySelectorAll('text')].filter((each) => { const box = each.getBoundingClientRect();"
            "return box.width && (box.left < all.left - 1 || box.right > all.right + 1 || box.bottom > all.bottom + 1);"
            "}).map((each) => each.textContent)"
        )
        assert outside == []


def test_with_very_many_classes_the_largest_mistakes_are_bars(browser: Any, tmp_path: Path) -> None:
    """Class 0 is taken for class 1 most often: 120 of the 160 images of class 0; then 119 of 159 of class 1, ..."""
    classes = range(120)
    folder = tmp_path / "run"
    summary = write_run(folder, 1, 0, names=[f"class {n}" for n in classes])
    summary["confusion"] = [
        [40 if true == predicted else (120 - true) * (predicted == true + 1) for predicted in classes]
        for true in classes
    ]
    (folder / "summary.json").write_text(json.dumps(summary))
    record_checksums(folder)
    path = tmp_path / "page.html"
    path.write_text(render_html(gather_studies([folder])), encoding="utf-8")
    opened(browser, path)
    bars = "[data-charts=confusion]"
    assert count(browser, f"{bars} .bar rect") == 20
    text = browser.find_element("css selector", f"{bars} svg[role=img]").get_attribute("aria-label")
    assert "class 0 as class 1 120 (75.0 %); class 1 as class 2 119 (74.8 %)" in text
    assert saved(browser, f"{bars} [data-save=CSV]").splitlines()[1] == "class 0,class 1,120"
    assert ElementTree.fromstring(saved(browser, f"{bars} [data-save=SVG]")).tag.endswith("svg")
