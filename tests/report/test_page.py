"""`halfmoon report`: its numbers are hand-derived, its files parse back, and what it is given is escaped or refused."""

import csv
import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_folders import (
    METHODS,
    compute_accuracy,
    make_run_entry,
    make_split_summary,
    make_sweep,
    read_sweep_file,
    record_checksums,
    write_line_sweep,
    write_run,
    write_sweep,
    write_sweep_file,
)

from halfmoon.cli import main as cli
from halfmoon.core.errors import UserError
from halfmoon.report import bands, frame, latex, scores, series
from halfmoon.report.gather import common_options, gather_studies
from halfmoon.report.headline import write_headline
from halfmoon.report.page import list_missing, render_html
from halfmoon.report.scores import (
    CellScore,
    compare_order,
    compare_to_published,
    final_scores,
    kendall_tau,
    scores_at_equal_steps,
    tau_interval,
)
from halfmoon.report.study import PublishedAccuracy, Study, read_sweep
from halfmoon.report.tables import MeanDeviation
from halfmoon.report.writer import write_report

SCALE = "Scale “small”: 12 of 200 rounds: not the paper's experiment."


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Two settings, three methods, two seeds; published numbers in the second setting."""
    return read_sweep(write_sweep(tmp_path_factory.mktemp("study")) / "sweep.json")


@pytest.fixture(scope="module")
def page(study: Study) -> str:
    return render_html([study])


class Reader(HTMLParser):
    """Collects the tags, the attributes, and the text outside scripts and styles of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def data_of(page: str) -> dict[str, Any]:
    (message,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert not set("<>&") & set(message)  # nothing in it can end or open anything
    return json.loads(message)


@pytest.mark.parametrize(
    ("measured", "published", "within", "noted"),
    [
        (
            MeanDeviation(63.0, 3.0),
            PublishedAccuracy(53.0, 4.0),
            True,
            "",
        ),  # 2 sqrt(9 + 16) = 10: on the edge is within
        (MeanDeviation(63.01, 3.0), PublishedAccuracy(53.0, 4.0), False, ""),
        (MeanDeviation(50.0, None), PublishedAccuracy(53.0, 1.5), True, scores.ONE_SEED),  # 2 * 1.5 = 3
        (MeanDeviation(49.9, None), PublishedAccuracy(53.0, 1.5), False, scores.ONE_SEED),
        (MeanDeviation(50.0, 1.0), PublishedAccuracy(52.0), True, scores.NO_PUBLISHED),
        (
            MeanDeviation(50.0, 0.0),
            PublishedAccuracy(50.5),
            False,
            scores.NO_PUBLISHED,
        ),  # alike seeds: a known deviation of zero
        (MeanDeviation(50.0, None), PublishedAccuracy(50.0), None, scores.NO_DEVIATION),
    ],
)
def test_the_two_sigma_rule(
    measured: MeanDeviation, published: PublishedAccuracy, within: bool | None, noted: str
) -> None:
    found = compare_to_published(measured, published)
    assert found.within is within
    assert found.note == noted
    assert found.difference == pytest.approx(measured.mean - published.mean)


def test_kendall_by_hand() -> None:
    """Of the 6 pairs of 1 2 3 4 and 1 3 2 4 one is turned: (5 - 1) / 6; with a tie on one side 2 / sqrt(3 * 2)."""
    assert kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1
    assert kendall_tau([1, 2, 3], [1, 1, 2]) == pytest.approx(2 / math.sqrt(6))
    assert kendall_tau([1], [1]) is None
    assert kendall_tau([], []) is None
    assert kendall_tau([1, 2], [5, 5]) is None


def test_equal_steps_of_runs(tmp_path: Path) -> None:
    """5 and 15 steps a round over 12 rounds, evaluated every second: 60 is common, there the second is at round 4."""
    write_run(tmp_path / "cmp" / "a", 1, 0)
    write_run(tmp_path / "cmp" / "b", 2, 0, steps=15)
    (study,) = gather_studies([tmp_path / "cmp"])
    score = scores_at_equal_steps(study)
    assert score.steps == {(): 60}
    means = [score.get(name, ()).last for name in ("fixmatch", "feddure")]
    assert [each.mean for each in means if each] == pytest.approx(
        [100 * compute_accuracy(1, 0, 12), 100 * compute_accuracy(2, 0, 4)]
    )


def test_the_interval_of_tau_by_students_t() -> None:
    """Of two rows, a unit of standard error each with 2 seeds, the order holds with P(|C| < d), C a sum of two Cauchys.

    At d = 10 it turns with arctan(2 / 10) / pi = 6.3 %: the interval has both orders. At d = 100 with 0.6 %: one.
    """
    published = PublishedAccuracy(60.0, None), PublishedAccuracy(50.0, None)
    for difference, expected in ((10, (-1.0, 1.0)), (100, (1.0, 1.0))):
        means = MeanDeviation(difference, math.sqrt(2)), MeanDeviation(0.0, math.sqrt(2))
        rows = [CellScore(last, None, line, seeds=2) for last, line in zip(means, published, strict=True)]
        assert tau_interval(rows) == expected
    assert tau_interval([CellScore(MeanDeviation(1.0, None), None, line, seeds=1) for line in published]) is None


def test_equal_steps_without_a_folder(tmp_path: Path) -> None:
    """A run without its folder has only its final accuracy: of 60 and 120 steps the second has none at 60 steps."""
    folder = write_sweep(tmp_path, seeds=1)
    metadata = read_sweep_file(folder)
    for cell in metadata["cells"]:
        cell["runs"][0]["folder"] = "gone"
        cell["runs"][0]["cost"]["labeled_steps"] = 120 if cell["at"]["method"] == "feddure" else 60
    write_sweep_file(folder, metadata)
    study = read_sweep(folder / "sweep.json")
    score = scores_at_equal_steps(study)
    assert score.steps == {("iid-iid",): 60, ("dir-dir",): 60}
    assert score.get("fedavg", ("iid-iid",)).last == (pytest.approx(100 * compute_accuracy(0, 0, 12)), None)
    lost = score.get("feddure", ("iid-iid",))
    assert (lost.last, lost.note) == (None, "no evaluation up to this number of steps is known")
    assert list_missing(study) == ["The folders of 6 of 6 finished runs are missing: no charts of those."]
    assert lost.note in Reader(render_html([study])).text


def test_order_and_scores_of_a_column(study: Study) -> None:
    """Accuracies grow with the method as the published 60, 70, 80 do: tau 1; without published ones there is none."""
    score = final_scores(study)
    found = compare_order(study, score, ("dir-dir",))
    assert found.published == found.measured == [*reversed(METHODS.values())]
    assert found.kendall_tau == 1
    assert compare_order(study, score, ("iid-iid",)) == ([], [], None, None)
    mark = score.get("feddure", ("dir-dir",))
    shares = [100 * compute_accuracy(2, seed, 12) for seed in (0, 1)]
    assert mark.last == (pytest.approx(sum(shares) / 2), pytest.approx(abs(shares[0] - shares[1]) / math.sqrt(2)))
    assert mark.verdict.difference == pytest.approx(sum(shares) / 2 - 80)
    assert mark.verdict.within is True
    assert score.get("feddure", ("iid-iid",)).verdict is None


def test_loose_runs_become_a_grid(tmp_path: Path) -> None:
    """Two values of gamma make columns, two values of a method's option make rows, and seeds neither."""
    for number, (method, seed, message) in enumerate(
        [
            (1, 0, "dirichlet_alpha = 0.1\n[options]\ntau = 0.9\n"),
            (1, 1, "dirichlet_alpha = 0.1\n[options]\ntau = 0.9\n"),
            (1, 0, "dirichlet_alpha = 0.1\n[options]\ntau = 0.5\n"),
            (2, 0, "dirichlet_alpha = 0.5\n"),
        ]
    ):
        write_run(tmp_path / "all" / str(number), method, seed, config=message)
    (study,) = gather_studies([tmp_path / "all"])
    assert [value.title for value in study.row_values] == [
        "FedAvg + FixMatch (tau 0.9)",
        "FedAvg + FixMatch (tau 0.5)",
        "FedDure",
    ]
    assert study.columns == [("0.1",), ("0.5",)]
    assert study.column_title(("0.5",)) == "dirichlet_alpha 0.5"
    cell = study.cell("fixmatch (tau 0.9)", ("0.1",))
    assert [run.seed for run in cell.runs] == [0, 1]
    assert study.cell("feddure", ("0.1",)) is None
    assert common_options(study) == {"data": "digits"}


def test_methods_may_differ_in_options_that_are_not_of_the_data(tmp_path: Path) -> None:
    """Each method with its learning rate remains in one column; one method with two of them has two."""
    write_run(tmp_path / "all" / "0", 1, 0, config="lr = 0.1\n")
    write_run(tmp_path / "all" / "1", 2, 0, config="lr = 0.2\n")
    (study,) = gather_studies([tmp_path / "all"])
    assert study.columns == [()]
    write_run(tmp_path / "all" / "2", 2, 0, config="lr = 0.3\n")
    (study,) = gather_studies([tmp_path / "all"])
    assert study.columns == [("0.1",), ("0.2",), ("0.3",)]


def test_one_run_in_two_arguments_counts_once(tmp_path: Path) -> None:
    write_run(tmp_path / "cmp" / "a", 1, 0)
    shutil.copytree(tmp_path / "cmp" / "a", tmp_path / "copy")
    (study,) = gather_studies([tmp_path / "cmp", tmp_path / "cmp" / "a", tmp_path / "copy"])
    assert len(list(study.finished())) == 1
    (tmp_path / "copy" / "run.json").write_text('{"identity": "another"}')
    with pytest.raises(UserError, match="fixmatch comes twice with seed 0"):
        gather_studies([tmp_path / "cmp", tmp_path / "copy"])


def test_comparison_has_its_order_and_lists_jobs_that_have_not_started(tmp_path: Path) -> None:
    for name, method in (("a", 2), ("b", 0)):
        write_run(tmp_path / "cmp" / name, method, 0, finished=name == "a")
    jobs = [{"folder": name, "config": ""} for name in ("b", "a", "c")]
    (tmp_path / "cmp" / "comparison.json").write_text(json.dumps({"jobs": jobs}))
    (study,) = gather_studies([tmp_path / "cmp"])
    assert [value.name for value in study.row_values] == ["fedavg", "feddure"]
    assert list_missing(study) == ["Not begun: c.", "Not finished, and left out: fedavg, seed 0."]


def damaged(**changes: Any) -> dict[str, Any]:
    cell = {"at": {"setting": "iid-iid", "method": "fedavg"}, "published": None, "runs": []}
    return make_sweep(cells=[cell]) | changes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"sweep\.json cannot be read"),
        ("[]", "has format None"),
        (json.dumps(damaged(format=2)), "has format 2, and this version of halfmoon reads format 1"),
        (json.dumps(damaged(cells="none")), "is damaged at cells"),
        (json.dumps(damaged(cells=[{"at": {"setting": "iid-iid"}, "runs": []}])), "cell 0 does not name one value"),
        (json.dumps(damaged(cells=damaged()["cells"] * 2)), "cell 1 has the coordinates of another cell"),
        (json.dumps(damaged(rows="nothing")), "'nothing' is not one of its axes"),
        (json.dumps(damaged(kind="lines")), "needs an axis as x"),
        (json.dumps(damaged(kind="lines", x="setting")), "the values of 'setting', its x, are not numbers"),
        (json.dumps(damaged()), "nothing is finished"),
    ],
)
def test_damaged_sweep_gives_a_message(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text(content)
    with pytest.raises(UserError, match=message):
        write_report([tmp_path / "sweep"], tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]


def test_a_finished_run_without_accuracy_is_damage(tmp_path: Path) -> None:
    metadata = damaged()
    metadata["cells"][0]["runs"] = [{"seed": 3, "finished": True}]
    (tmp_path / "a.json").write_text(json.dumps(metadata))
    with pytest.raises(UserError, match="cell 0, seed 3, is finished but has no accuracy or cost"):
        gather_studies([tmp_path / "a.json"])


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    write_run(tmp_path / "open", 1, 0, finished=False)
    for name, output in (
        ("empty", "has no run"),
        ("nowhere", "does not exist"),
        ("file.txt", "is no run"),
        ("open", "nothing is finished"),
    ):
        with pytest.raises(UserError, match=output):
            write_report([tmp_path / name], tmp_path / "page.html")
    assert not list(tmp_path.glob("page.*"))


def test_a_bad_out_is_one_sentence(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 1, 0)
    for out, output in (
        (tmp_path, "is a folder"),
        (tmp_path / "page.csv", "does not end in .html"),
        (tmp_path / "nowhere" / "page.html", "there is no folder"),
    ):
        with pytest.raises(UserError, match=re.escape(output)):
            write_report([tmp_path / "run"], out)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_folder_with_a_different_run_is_excluded(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, seeds=1)
    metadata = read_sweep_file(folder)
    metadata["cells"][0]["runs"][0]["identity"] = "what it was"
    write_sweep_file(folder, metadata)
    study = read_sweep(folder / "sweep.json")
    assert list_missing(study) == ["The folders of 1 finished runs now contain another run: no charts of those."]
    assert len(study.runs) == 5


def test_the_csv_parses_back(tmp_path: Path) -> None:
    """Six cells of two seeds, unrounded; the cell with a failed run says why, the one without runs retains its number."""
    folder = write_sweep(tmp_path)
    metadata = read_sweep_file(folder)
    metadata["cells"][3]["runs"] = []
    metadata["cells"][4]["runs"][1] = {"seed": 1, "finished": False, "failed": 'the loss, "again", is no number'}
    write_sweep_file(folder, metadata)
    rows = list(csv.DictReader(io.StringIO(frame.format_csv([read_sweep(folder / "sweep.json")]))))
    assert len(rows) == 2 * 6 - 1
    first = rows[0]
    assert (first["study"], first["scale"], first["setting"], first["method"]) == (
        "toy-table1",
        "small",
        "iid-iid",
        "fedavg",
    )
    assert "not the paper's experiment" in first["scale_about"]
    assert float(first["last_percent"]) == 100 * compute_accuracy(0, 0, 12)
    assert (first["equal_labeled_steps"], float(first["equal_steps_percent"])) == (
        "60",
        100 * compute_accuracy(0, 0, 12),
    )
    assert (first["published_percent"], first["bytes_up"], first["seconds"]) == ("", "6000000", "6.0")
    bare = rows[6]
    assert (bare["method"], bare["seed"], bare["last_percent"], bare["published_percent"]) == ("fedavg", "", "", "60.0")
    assert (rows[8]["finished"], rows[8]["failed"], rows[8]["last_percent"]) == (
        "false",
        'the loss, "again", is no number',
        "",
    )


def test_axis_named_like_a_column_is_distinct(tmp_path: Path) -> None:
    metadata = make_sweep(columns=["seed"])
    metadata["axes"][0]["name"] = "seed"
    done = write_run(tmp_path / "cells" / "a", 0, 7)
    metadata["cells"] = [{"at": {"seed": "iid-iid", "method": "fedavg"}, "runs": [make_run_entry(done, "cells/a")]}]
    write_sweep_file(tmp_path, metadata)
    (row,) = csv.DictReader(io.StringIO(frame.format_csv(gather_studies([tmp_path]))))
    assert (row["axis_seed"], row["seed"]) == ("iid-iid", "7")


def test_latex_escapes() -> None:
    assert latex.escape_latex("50 % of a_b & c#d {e}$") == r"50 \% of a\_b \& c\#d \{e\}\$"
    assert latex.escape_latex("\\x^~") == r"\textbackslash{}x\textasciicircum{}\textasciitilde{}"
    assert latex.escape_latex("two\nlines") == "two lines"


def cells(line: str) -> int:
    spans = [int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line)]
    return len(re.findall(r"(?<!\\)&", line)) + 1 + sum(spans)


def test_every_line_of_a_latex_table_fills_its_columns(tmp_path: Path) -> None:
    """Four columns of numbers: measured in the first setting; measured and published in the second; so 1 + 3."""
    message = latex.format_latex(gather_studies([write_sweep(tmp_path, title="50 % & more_of it")]))
    tables = re.findall(r"\\begin\{tabular\}\{(\w+)\}\n(.*?)\\end\{tabular\}", message, re.DOTALL)
    assert [columns for columns, _ in tables] == ["lrrr", "lrrr"]
    for _, body in tables:
        lines = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len(lines) >= 5
        assert {cells(line) for line in lines} == {4}
    captions = re.findall(r"\\caption\{(.*)\}", message)
    assert len(captions) == 2
    for caption in captions:
        assert r"50 \% \& more\_of it" in caption
        assert r"\textbf{Scale ``small'': 12 of 200 rounds: not the paper's experiment.}" in caption
    assert message.count(r"\begin{table}") == message.count(r"\end{table}") == 2


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_the_latex_compiles(tmp_path: Path) -> None:
    odd = '50 % & a_b #c {d} $e ~ ^ \\ < > | " “q” \N{EN DASH} \N{GREEK SMALL LETTER ALPHA}'
    (tmp_path / "tables.tex").write_text(latex.format_latex(gather_studies([write_sweep(tmp_path, title=odd)])))
    page = r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{tables}\end{document}"
    (tmp_path / "page.tex").write_text(page)
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


EVIL = '</script><script>alert("1")</script><b a=\'&amp;">'


def test_input_text_is_escaped(tmp_path: Path) -> None:
    """Titles, names of classes, notes, and reasons of failure with tags in them stay text; the two scripts are ours."""
    names = [EVIL, "dog", "ship"]
    metadata = make_sweep(title=EVIL, about=EVIL, reading=EVIL, command=EVIL, scale={"name": EVIL, "about": EVIL})
    metadata["axes"][1]["values"][1]["title"] = EVIL
    done = write_run(tmp_path / "x" / "cells" / "a", 1, 0, names=names, config=f"lr = '''{EVIL[:-4]}'''\n")
    runs = [make_run_entry(done, "cells/a"), {"seed": 1, "finished": False, "failed": EVIL}]
    published = {"mean": 50.0, "deviation": None, "note": EVIL}
    metadata["cells"] = [{"at": {"setting": "iid-iid", "method": "fixmatch"}, "runs": runs, "published": published}]
    write_sweep_file(tmp_path / "x", metadata)
    write_run(tmp_path / "<script>&amp;" / "b", 2, 0, title=EVIL, names=names)
    page = render_html(gather_studies([tmp_path / "x", tmp_path / "<script>&amp;"]))
    read = Reader(page)
    assert read.tags.count("script") == 2
    assert page.count("</script>") == 2
    assert not {"b"} & set(read.tags)
    assert len(re.findall(re.escape(EVIL), read.text)) > 8
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    data = data_of(page)
    assert data["studies"][0]["groups"][0]["classes"] == names
    assert data["studies"][0]["styles"][1]["title"] == EVIL


def test_the_page_needs_no_network(page: str) -> None:
    """No file is loaded; the only addresses are names of XML's namespaces, in the charting library."""
    names = {"1999/xhtml", "1999/xlink", "2000/svg", "2000/xmlns/", "XML/1998/namespace"}
    assert set(re.findall(r"\w+://[^\s\"'<]+", page)) == {f"http://www.w3.org/{name}" for name in names}
    addresses = [value or "" for name, value in Reader(page).attributes if name in ("src", "href")]
    assert [address for address in addresses if not address.startswith("data:")] == []
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_every_table_shows_the_scale(tmp_path: Path, page: str) -> None:
    read = Reader(page)
    # A grid of all columns (at equal steps it would say the same); in each of two columns costs; and the order where
    # something is published.
    assert read.tags.count("table") == 1 + 2 + 1
    assert read.text.count(SCALE) == read.tags.count("table") + 1  # and the banner
    free = render_html(gather_studies([write_sweep(tmp_path / "free", scale=None)]))
    assert "Scale “" not in Reader(free).text


def test_page_shows_the_numbers(page: str) -> None:
    """FedDure: seeds 0.1 + 0.71 (1 - e^-3) + 0.01 s, so 77.47 and 78.47: mean 77.97, s = 1 / sqrt 2; paper 80 +- 1.
    2 sqrt(0.5 + 1) = 2.45 against -2.03: within."""
    text = Reader(page).text
    assert "77.97 ± 0.71" in text
    assert "paper 80.00 ± 1.00" in text
    assert "\N{MINUS SIGN}2.03 within 2\N{GREEK SMALL LETTER SIGMA}" in text
    assert "Kendall's τ = 1.00 [" in text
    assert f"{scores.NO_PUBLISHED}." in text
    assert "a processor, 2 cores, no GPU" in text
    assert "halfmoon sweep toy-table1 --scale small" in text


def test_lines_are_means_in_bands_over_seeds(study: Study) -> None:
    """Seeds differ by 0.01: mean in the middle, the band one point wide; accuracy above is known from round 4 on."""
    group = series.column_charts(study, ("iid-iid",))
    assert group["classes"] == ["cat", "dog", "ship"]
    none = group["lines"][0]
    some = group["lines"][1]
    assert none["series"].keys() == {"accuracy", "js_app_u", "js_labeled"}
    line = some["series"]["accuracy"]
    assert line["x"] == [2, 4, 6, 8, 10, 12]
    assert line["low"][1] == pytest.approx(100 * compute_accuracy(1, 0, 4), abs=1e-3)
    assert line["mean"][1] == pytest.approx(line["low"][1] + 0.5, abs=1e-3)
    assert line["high"][1] == pytest.approx(line["low"][1] + 1, abs=1e-3)
    assert some["series"]["above"]["x"] == [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert some["series"]["share_used"]["mean"][0] == 4
    assert some["costs"] == {
        "steps": [10, 20, 30, 40, 50, 60],
        "forward": [400, 800, 1200, 1600, 2000, 2400],
        "megabytes": [3, 6, 9, 12, 15, 18],
        "seconds": [1, 2, 3, 4, 5, 6],
    }
    assert some["confusion"] == {"matrix": [[80, 20, 0], [0, 80, 20], [20, 0, 80]]}
    assert sum(some["class_shares"]["accuracy"]) == pytest.approx(100, abs=0.01)
    assert some["seeds"] == 2


def test_runs_of_older_versions_lack_only_some_charts(tmp_path: Path) -> None:
    write_run(tmp_path / "old", 1, 0, extras=False)
    (study,) = gather_studies([tmp_path / "old"])
    (line,) = series.column_charts(study, ())["lines"]
    assert (line["confusion"], line["class_shares"]) == (None, None)
    assert "js_app_u" not in line["series"]
    assert series.column_charts(study, ())["classes"] == ["0", "1", "2"]
    assert [note.split(" (")[0] for note in list_missing(study)] == [
        "No split.json",
        "No class distributions",
        "No confusion matrix",
    ]
    assert "What is missing" in Reader(render_html([study])).text


def write_federation(path: Path) -> None:
    """Write the folder of a federation whose server has no images: the sites evaluate, a round later."""
    write_run(path, 1, 0, extras=False, config='[federation]\nname = "ward"\nsites = ["a", "b"]\n')
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("test", None)
        if row["round"] > 1:
            row["evaluation"] = {"accuracy": row["round"] / 20, "round": row["round"] - 1, "sites": 2}
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record_checksums(path)


def test_a_federations_folder_is_reported_as_one(tmp_path: Path) -> None:
    """Its curve is the sites' accuracy of the round that they evaluated; no note mentions older versions."""
    write_federation(tmp_path / "fed")
    (study,) = gather_studies([tmp_path / "fed"])
    assert common_options(study)["federation"] == "ward"
    assert [note.split(" (a federation")[0] for note in list_missing(study)] == [
        "No chart of clients and classes, no class distributions",
        "No confusion matrix",
    ]
    line = series.column_charts(study, ())["lines"][0]["series"]["accuracy"]
    assert (line["x"][:2], line["mean"][:2]) == ([1, 2], [10, 15])
    text = Reader(render_html([study])).text
    assert "older version" not in text
    assert "69.86" in text


def test_csv_has_no_formula(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, title="x", recipe="=1+1", paper="@x")
    (first, *_) = csv.DictReader(io.StringIO(frame.format_csv([read_sweep(folder / "sweep.json")])))
    assert (first["study"], first["paper"]) == ("'=1+1", "'@x")


def test_many_rounds_are_thinned() -> None:
    stored = bands.pick_evenly(range(1, 2001), 300)
    assert (len(stored), stored[0], stored[-1]) == (300, 1, 2000)
    assert stored == sorted(set(stored))
    assert set(np.diff(stored)) == {6, 7}
    assert bands.pick_evenly([3, 5], 300) == [3, 5]
    assert bands.pick_evenly(range(7), 3) == [0, 3, 6]


def test_a_different_split_is_drawn_once(tmp_path: Path, study: Study) -> None:
    """Two settings with a split each, which 3 methods with 2 seeds share."""
    first, second = series.split_charts(study)
    assert (first["title"], first["runs"]) == ("IID-IID", 6)
    assert second["title"] == "DIR-DIR"
    assert first["labeled"] == [[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]]
    assert first["unlabeled"][1] == [10, 20, 30]
    write_run(tmp_path / "many", 1, 0, split=make_split_summary(100, ["a", "b"], server=True))
    (split,) = series.split_charts(gather_studies([tmp_path / "many"])[0])
    assert (len(split["shown_clients"]), split["shown_clients"][0], split["shown_clients"][-1]) == (40, 0, 99)
    assert split["server"] == [1, 1]
    assert len(split["labeled"]) == 40


def test_splits_are_named_after_who_uses_them(study: Study) -> None:
    """The column, with rows and seeds if not all of them share the split; "" if all runs share it."""
    every = [series.SplitUser((c,), r, s) for c in ("iid-iid", "dir-dir") for r in METHODS for s in (0, 1)]
    assert series.title_users(study, every, every) == ""
    assert series.title_users(study, every[:6], every) == "IID-IID"
    assert series.title_users(study, [every[0], every[2], every[4], *every[6:]], every) == "IID-IID, seed 0; DIR-DIR"
    assert series.title_users(study, every[4:6], every) == "IID-IID, FedDure"
    assert series.title_users(study, every[1:2], every) == "IID-IID, FedAvg (labeled only), seed 1"


def test_very_many_classes_are_listed(tmp_path: Path) -> None:
    names = [str(n) for n in range(101)]
    write_run(tmp_path / "run", 1, 0, names=names, split=make_split_summary(1, names))
    (line,) = series.column_charts(gather_studies([tmp_path / "run"])[0], ())["lines"]
    assert line["confusion"]["largest"][0] == [100, 0, 20, 100]
    assert len(line["confusion"]["largest"]) == 20


def test_accuracy_along_an_axis(tmp_path: Path) -> None:
    """Rows are lines; where rows are the axis, the columns are."""
    folder = write_line_sweep(tmp_path)
    study = read_sweep(folder / "sweep.json")
    (panel,) = series.line_charts(study, final_scores(study))
    assert (panel["option"], panel["title"]) == ("dirichlet_alpha", "")
    assert [line["title"] for line in panel["lines"]] == [*METHODS.values()]
    line = panel["lines"][2]
    assert [point["x"] for point in line["points"]] == [0.1, 0.5, 1.0]
    assert line["points"][2]["mean"] == pytest.approx(100 * compute_accuracy(2, 0, 12), abs=1e-3)
    assert line["published"][0] == {"x": 0.1, "mean": 62.0, "deviation": 1.0}
    assert panel["lines"][0]["published"] == []
    assert "dirichlet_alpha 0.5" in Reader(render_html([study])).text
    write_sweep_file(folder, read_sweep_file(folder) | {"rows": "dirichlet_alpha", "columns": ["method"]})
    study = read_sweep(folder / "sweep.json")
    (panel,) = series.line_charts(study, final_scores(study))
    assert [line["title"] for line in panel["lines"]] == [*METHODS.values()]


def test_sweep_with_another_measure_names_it(tmp_path: Path) -> None:
    """Its tables name the measure, and have no test accuracy at equal steps."""
    folder = write_line_sweep(tmp_path)
    text = Reader(render_html([read_sweep(folder / "sweep.json")])).text
    assert "Test accuracy along dirichlet_alpha" in text
    assert "at equal labeled steps" in text
    write_sweep_file(folder, read_sweep_file(folder) | {"measure": "accuracy of pseudo-labels"})
    text = Reader(render_html([read_sweep(folder / "sweep.json")])).text
    assert "Accuracy of pseudo-labels along dirichlet_alpha" in text
    assert "at equal labeled steps" not in text


def test_kind_splits_shows_only_splits(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, kind="splits")
    metadata = read_sweep_file(folder)
    for cell in metadata["cells"]:
        for run in cell["runs"]:
            run |= {"accuracy": None, "cost": None}
    write_sweep_file(folder, metadata)
    page = render_html(gather_studies([folder]))
    assert "table" not in Reader(page).tags
    (study,) = data_of(page)["studies"]
    assert (study["groups"], len(study["splits"])) == ([], 2)
    shutil.rmtree(tmp_path / "cells")
    with pytest.raises(UserError, match="nothing is finished"):
        gather_studies([folder])


def test_the_command_writes_three_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", 1, 0)
    out = tmp_path / "page.html"
    arguments = ["report", str(tmp_path / "run"), "--out", str(out)]
    assert cli.main([*arguments, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output == {
        "page": str(out),
        "csv": str(tmp_path / "page.csv"),
        "latex": str(tmp_path / "page.tex"),
        "missing": [],
    }
    assert out.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.csv", "page.html", "page.tex", "run"]
    before = out.read_bytes()
    assert cli.main(arguments) == 0
    assert "page: " in capsys.readouterr().out
    assert out.read_bytes() == before


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 1, 0)
    script = (
        "import argparse, sys; from pathlib import Path; from halfmoon.cli.commands import report; "
        "report.run(argparse.Namespace(runs=[Path('run')], out=Path('page.html'), json=True)); "
        "print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.endswith("[]\n")


LOW = ("fedavg", "FedAvg (labeled only)")
MID = ("feddure", "FedDure")
ALSO = ("fixmatch", "FedAvg + FixMatch")
TOP = ("fedavg-sl", "FedAvg-SL (all labels)")


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (
            ((*LOW, 0.6), (*MID, 0.7), (*TOP, 0.8)),
            "FedDure is the best with 70.0 %, 10.0 points above FedAvg (labeled only). It has 10.0 of the 20.0 points "
            "between FedAvg (labeled only) and all labels.",
        ),
        (((*LOW, 0.6),), "FedAvg (labeled only) has 60.0 %."),
        (
            ((*LOW, 0.7), (*MID, 0.6), (*TOP, 0.8)),
            "No method gains over training on labels alone: FedAvg (labeled only) has 70.0 %, and the best method, "
            "FedDure, is 10.0 points below it. FedAvg-SL (all labels) has 80.0 %.",
        ),
        (
            ((*MID, 0.7), (*LOW, 0.7)),
            "FedAvg (labeled only) has 70.0 %, and the best method, FedDure, has the same accuracy.",
        ),
        (((*LOW, 0.7), (*MID, 0.6), (*TOP, 0.7)), "FedAvg-SL (all labels) is not above it, so this is no upper bound"),
        (((*LOW, 0.7), (*MID, 0.8), (*TOP, 0.6)), "so this is no upper bound"),
        (((*LOW, 0.7), (*MID, 0.8), (*TOP, 0.75)), "(all labels) is below FedDure, so this is no upper"),
        (
            ((*LOW, 0.6), (*LOW, 0.62), (*MID, 0.7), (*MID, 0.74)),
            "11.0 points above FedAvg (labeled only) (95 % interval -1.7 to +23.7, so 2 seeds are too few",
        ),
        (
            ((*LOW, 0.6), (*MID, 0.7), (*ALSO, 0.7), (*TOP, 0.8)),
            "FedDure and FedAvg + FixMatch are the best with 70.0 %, 10.0 points above FedAvg (labeled only). They have "
            "10.0 of the 20.0 points between FedAvg (labeled only) and all labels.",
        ),
        (
            ((*LOW, 0.7), (*MID, 0.6), (*ALSO, 0.6)),
            "and the best methods, FedDure and FedAvg + FixMatch, are 10.0 points below it.",
        ),
        # The mean of three seeds is 70 % in both rows; their floating-point numbers differ in the last digit.
        (
            ((*MID, 0.7), (*MID, 0.7), (*MID, 0.7), (*ALSO, 0.6), (*ALSO, 0.7), (*ALSO, 0.8)),
            "FedDure with 70.0 ± 0.0 % and FedAvg + FixMatch with 70.0 ± 10.0 % are the best.",
        ),
        (((*LOW, 0.7), (*MID, 0.7002)), "FedDure is the best with 70.0 %, less than 0.1 points above FedAvg"),
    ],
)
def test_headline_describes_the_result(
    tmp_path: Path, shares: tuple[tuple[str, str, float], ...], message: str
) -> None:
    """All labels do not compete. A method that comes twice has two seeds: 10 and 12 points are 11 ± 12.706 standard
    errors of 1."""
    seeds = Counter[str]()
    for n, (method, title, share) in enumerate(shares):
        folder = tmp_path / str(n)
        summary = write_run(folder, 0, seeds[method], title=title, config=f"# {n}\n")
        summary |= {"method": method, "accuracy": {"last": share, "best": share, "best_round": 1}}
        (folder / "summary.json").write_text(json.dumps(summary))
        file = folder / "config.toml"
        file.write_text(file.read_text().replace('"fedavg"', f'"{method}"'))
        record_checksums(folder)
        seeds[method] += 1
    assert message in write_headline(gather_studies([tmp_path])[0])


def write_methods(root: Path, shares: dict[str, dict[tuple[str, str], float]]) -> None:
    """Write a run of each method on each data set with a final accuracy."""
    for data, by_method in shares.items():
        for (method, title), share in by_method.items():
            folder = root / f"{data}-{method}"
            summary = write_run(folder, 0, 0, title=title, data=data)
            summary |= {"method": method, "accuracy": {"last": share, "best": share, "best_round": 1}}
            (folder / "summary.json").write_text(json.dumps(summary))
            file = folder / "config.toml"
            file.write_text(file.read_text().replace('"fedavg"', f'"{method}"'))
            record_checksums(folder)


def test_all_methods_with_the_best_accuracy_are_marked(tmp_path: Path) -> None:
    """In the table of the page, and in bold in LaTeX; the upper bound does not compete."""
    write_methods(tmp_path, {"a": {LOW: 0.6, MID: 0.7, ALSO: 0.7, TOP: 0.8}})
    (study,) = gather_studies([tmp_path])
    page = render_html([study])
    best = re.findall(r'<tr class="best"><th scope="row">(.*?) <span class="role best">best</span>', page)
    assert best == ["FedDure", "FedAvg + FixMatch"]
    (table, *_) = latex.format_latex([study]).split(r"\end{table}")  # that of the final model
    bold = [line for line in table.splitlines() if r"\textbf" in line]
    assert [line.split(" & ")[0] for line in bold] == ["FedDure", "FedAvg + FixMatch"]


def test_a_baseline_with_the_best_accuracy_is_marked_as_both(tmp_path: Path) -> None:
    write_methods(tmp_path, {"a": {LOW: 0.7, MID: 0.6}})
    (study,) = gather_studies([tmp_path])
    marks = '<span class="role baseline">baseline</span> <span class="role best">best</span>'
    assert f'<tr class="baseline best"><th scope="row">FedAvg (labeled only) {marks}' in render_html([study])


def test_the_headline_of_several_columns_names_all_with_as_many_wins(tmp_path: Path) -> None:
    write_methods(tmp_path, {"a": {MID: 0.7, ALSO: 0.7}, "b": {MID: 0.7, ALSO: 0.7}})
    assert write_headline(gather_studies([tmp_path])[0]) == (
        "FedDure and FedAvg + FixMatch are each the best in all 2 columns (equal accuracies count for each). "
        "In the mean of the columns FedDure and FedAvg + FixMatch have the same accuracy."
    )


def test_the_headline_of_several_columns_counts(study: Study, page: str) -> None:
    assert write_headline(study).startswith("FedDure is the best in all 2 columns. In the mean of the columns it is ")
    assert f'<p class="headline">{write_headline(study)}</p>' in page


def test_the_headline_of_several_columns_counts_those_without_a_gain(tmp_path: Path) -> None:
    """Labels only are the best on two of three data sets: by 10 and 20 points, and 6 below; 8 in the mean."""
    write_methods(tmp_path, {"a": {LOW: 0.7, MID: 0.6}, "b": {LOW: 0.7, MID: 0.5}, "c": {LOW: 0.6, MID: 0.66}})
    assert write_headline(gather_studies([tmp_path])[0]) == (
        "No method gains over training on labels alone in 2 of 3 columns (FedDure is the best in 1). "
        "In the mean of the columns FedAvg (labeled only) is 8.0 points above FedDure."
    )


def test_two_unlike_runs_have_two_lines_of_head_and_a_folded_list(tmp_path: Path) -> None:
    """Thirteen options differ; the data set is called by its name, and no path of a machine is anywhere."""
    options = [
        f"{key} = {{}}\n" for key in ("clients", "rounds", "lr", "width", "momentum", "labels_per_class", "split_seed")
    ]
    for n, place in enumerate(("/home/me/data/mri", "/somewhere/else/digits")):
        config = "".join(line.format(n + 3) for line in options)
        write_run(tmp_path / str(n), 2, 0, config=config, data=place)
    (study,) = gather_studies([tmp_path / "0", tmp_path / "1"])
    assert study.column_axes == ["data", "configuration"]
    assert [study.column_title(column) for column in study.columns] == [
        "mri, configuration A",
        "digits, configuration B",
    ]
    assert study.legend()["configuration A"].startswith("clients 3, ")
    assert study.sweep.title == "FedDure on mri and digits"
    page = render_html([study])
    assert page.count('<th scope="col" colspan') == 2 * 2
    assert "<summary>Configurations</summary>" in page
    for message in (page, frame.format_csv([study]), latex.format_latex([study])):
        assert "/home/me" not in message
        assert "momentum 3" in message  # nothing that tells the two apart is lost


def test_data_sets_of_one_name_get_a_folder_more(tmp_path: Path) -> None:
    for n, place in enumerate(("/a/north/mri", "/a/south/mri")):
        write_run(tmp_path / str(n), 2, 0, data=place)
    (study,) = gather_studies([tmp_path / "0", tmp_path / "1"])
    assert [study.column_title(column) for column in study.columns] == ["north/mri", "south/mri"]


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (7, 2), (40, 3), (3, 90)])
def test_latex_of_any_number_of_runs_has_tables_that_fit(tmp_path: Path, columns: int, rows: int) -> None:
    """Each table has at most six columns and forty rows, all its lines as many cells, and together they say it all."""
    metadata = make_sweep(scale=None)
    names = [f"setting-{n}" for n in range(columns)]
    methods = [f"method-{n}" for n in range(rows)]
    metadata["axes"] = [
        {"name": "setting", "values": [{"name": n, "title": n} for n in names]},
        {"name": "method", "values": [{"name": n, "title": n} for n in methods]},
    ]
    summary = {"seed": 0, "accuracy": {"last": 0.5, "best": 0.5, "best_round": 1}, "seconds": 1.0}
    summary["cost"] = {"labeled_steps": 1, "forward": 1, "backward": 1, "bytes_down": 1, "bytes_up": 1}
    for name in names:
        for method in methods:
            metadata["cells"].append(
                {"at": {"setting": name, "method": method}, "published": None, "runs": [make_run_entry(summary)]}
            )
    write_sweep_file(tmp_path, metadata)
    study = read_sweep(tmp_path / "sweep.json")
    message = latex.format_tables(study, final_scores(study), "Accuracy")
    tables = re.findall(r"\\begin\{tabular\}\{(l[lr]*)\}(.*?)\\end\{tabular\}", message, re.S)
    assert len(tables) == -(-columns // 6) * -(-rows // 40)
    assert message.count(r"\begin{table}") == message.count(r"\end{table}") == len(tables)
    assert message.count("50.00") == columns * rows
    for kinds, body in tables:
        assert len(kinds) <= 7
        lines = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len(lines) <= 42
        assert {cells(line) for line in lines} == {len(kinds)}
