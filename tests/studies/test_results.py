"""Runs that are started from Python: what they return, calling again, and errors and remarks in Python's words."""

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import halfmoon
from halfmoon.core.errors import OptionText
from halfmoon.methods.objectives import FixMatch
from halfmoon.report.run_reader import StoredRun
from halfmoon.runs import python_progress
from halfmoon.runs.progress import Progress
from halfmoon.storage.atomic_io import read_rows
from halfmoon.studies import results

SMALL = {"rounds": 2, "clients": 4, "cohort": 2, "data_share": 0.3, "steps": 2, "threads": 1}
METHODS = ["fedavg", "fedavg-fixmatch"]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> halfmoon.Results:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return halfmoon.compare(METHODS, seeds=2, run_dir=tmp_path_factory.mktemp("pair") / "both", **SMALL)


def test_run_is_imported_without_pandas_and_charts():
    """They take a third of the time until the first step, and only results need them."""
    code = "import sys, halfmoon; halfmoon.run; sys.exit('pandas' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_frame_has_the_numbers_of_the_files(pair: halfmoon.Results) -> None:
    table = pair.to_frame()
    assert list(table) == ["run", "method", "seed", "round", "metric", "value", "unit"]
    accuracy = table[table["metric"] == "accuracy"].set_index(["method", "seed", "round"])["value"]
    for path, method, seed in zip(pair.runs, np.repeat(METHODS, 2), (0, 1, 0, 1), strict=True):
        for row in read_rows(path / "metrics.jsonl"):
            assert accuracy[method, seed, row["round"]] == 100 * row["test"]["accuracy"]


def test_a_summary_is_the_mean_of_the_seeds(pair: halfmoon.Results) -> None:
    ends = [100 * each["accuracy"]["last"] for each in pair.summaries]
    means = [np.mean(ends[:2]), np.mean(ends[2:])]
    assert list(pair.details["last_percent"]) == pytest.approx(means)
    assert list(pair.summary["accuracy (%)"]) == pytest.approx(means, abs=0.005)
    assert list(pair.summary["std"]) == pytest.approx([np.std(ends[:2], ddof=1), np.std(ends[2:], ddof=1)], abs=0.005)
    assert max(map(len, repr(pair.summary).splitlines())) <= 80
    assert "..." not in repr(pair.summary)
    assert list(pair.differences["mean"]) == pytest.approx([np.mean(ends[2:]) - np.mean(ends[:2])])


def test_a_result_is_one_line_and_a_table(pair: halfmoon.Results) -> None:
    assert len(repr(pair).splitlines()) == 1
    assert "4 runs" in repr(pair)
    assert pair._repr_html_().count("<tr>") == 1 + 2 + 1 + 1  # two methods, and their difference


def test_a_plot_has_a_line_a_method_and_a_band_over_seeds(pair: halfmoon.Results) -> None:
    axes = Figure().add_subplot()
    assert pair.plot("accuracy", axes) is axes.figure
    table = pair.to_frame()
    table = table[(table["metric"] == "accuracy") & (table["method"] == "fedavg")]
    assert list(axes.lines[0].get_ydata()) == pytest.approx(list(table.groupby("round")["value"].mean()))
    assert (len(axes.lines), len(axes.collections)) == (2, 2)
    with pytest.raises(halfmoon.UserError, match="did you mean 'accuracy'"):
        pair.plot("accurcy", axes)


def test_loading_and_calling_again_give_the_same(pair: halfmoon.Results) -> None:
    """Nothing is trained again: the files keep their bytes."""
    before = {path: path.read_bytes() for path in pair.folder.rglob("*") if path.is_file()}
    repeated = halfmoon.compare(METHODS, seeds=2, run_dir=str(pair.folder), **SMALL)
    for other in (repeated, halfmoon.load_run(pair.folder), halfmoon.resume(str(pair.folder))):
        assert other.to_frame().equals(pair.to_frame())
    assert {path: path.read_bytes() for path in pair.folder.rglob("*") if path.is_file()} == before


class Stop(halfmoon.NullCallback):
    """Stop after the first round, as Ctrl-C does."""

    def round(self, run: halfmoon.RunInfo, row: dict) -> None:
        raise KeyboardInterrupt


def test_a_run_again_goes_on_and_another_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = {**SMALL, "run_dir": tmp_path / "run", "checkpoint_every": 1}
    whole = halfmoon.run(method="fedavg", **{**there, "run_dir": tmp_path / "whole"})
    with pytest.raises(KeyboardInterrupt):
        halfmoon.run(method="fedavg", watch=Stop(), **there)
    assert "1 rounds so far" in repr(halfmoon.load_run(tmp_path / "run"))
    result = halfmoon.run(method="fedavg", **there)
    assert (result.folder / "metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        halfmoon.run(method="fedavg", **there)
        assert "contains this run, finished: its results are read; set another run_dir" in capsys.readouterr().err
        halfmoon.run(method="fedavg", progress=False, **there)
        assert capsys.readouterr() == ("", "")
    with pytest.raises(halfmoon.UserError, match=r"another run_dir, or `halfmoon.resume\(") as refusal:
        halfmoon.run(method="fedavg", **{**there, "rounds": 3})
    assert "--" not in str(refusal.value)


def test_an_object_of_ones_own_and_keywords(tmp_path: Path) -> None:
    config = halfmoon.Config(**SMALL)
    result = halfmoon.run(config, method=FixMatch(threshold=0.5), rounds=1, run_dir=tmp_path / "own")
    assert result.summaries[0]["rounds"] == 1
    assert halfmoon.run(config, method=FixMatch(threshold=0.5), rounds=1, run_dir=tmp_path / "own").runs == result.runs


def test_a_model_predicts_evaluates_calibrates_and_exports(pair: halfmoon.Results, tmp_path: Path) -> None:
    test = halfmoon.load_data("digits").test
    model = pair.model
    values = model.probabilities(test.images)
    table = model.predict(test)
    assert list(table["label"]) == [model.classes[k] for k in values.argmax(1)]
    assert list(table["probability"]) == list(values.max(1))
    scores = model.evaluate(test)
    assert scores["accuracy"] == (values.argmax(1) == test.labels).mean() == pair.summaries[0]["accuracy"]["last"]
    calibrated = model.calibrate(test)
    assert (calibrated.predict(test)["label"] == table["label"]).all()
    assert halfmoon.load_model(pair.runs[0]).card.temperature == calibrated.card.temperature != 1
    loss = [
        -np.log(each.probabilities(test.images)[range(len(test)), test.labels]).mean() for each in (model, calibrated)
    ]
    assert loss[1] < loss[0]
    assert model.export(tmp_path / "model.pt2").path.exists()
    with pytest.raises(halfmoon.UserError, match=r"\.onnx or \.pt2"):
        model.export(tmp_path / "model.bin")


def test_a_sweep_is_played_and_read(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'title = "Two rates"\npaper = "none"\nitem = "none"\nabout = "two rates"\nkind = "table"\nrows = "method"\n'
        'columns = ["lr"]\nseeds = [0]\n'
        "[protocol]\nrounds = 1\nclients = 4\ncohort = 2\ndata_share = 0.3\nsteps = 1\n"
        '[axes.method.fedavg]\nset = { method = "fedavg" }\n[axes.method.same]\nset = { method = "fedavg" }\n'
        '[axes.lr."0.01"]\nset = { lr = 0.01 }\n[axes.lr."0.02"]\nset = { lr = 0.02 }\n'
    )
    result = halfmoon.sweep(recipe, out=tmp_path / "out", seeds=2)
    assert "8 runs of 4 cells" in repr(result)
    assert list(result.summary["seeds"]) == ["2"] * 4
    table = result.to_frame()
    assert set(table["axis:lr"]) == {"0.01", "0.02"}
    assert set(table["axis:method"]) == {"fedavg", "same"}  # cells that share their runs
    assert halfmoon.load_run(result.folder).to_frame().equals(table)
    assert "<table>" in result._repr_html_()
    assert result.to_latex().count("\\begin{table}") == 2  # at the end, and at equal steps
    with pytest.raises(halfmoon.UserError, match="belongs into the recipe"):
        halfmoon.sweep(recipe, out=tmp_path / "out", rounds=3)


def test_without_a_finished_run_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(halfmoon.UserError, match=r"holds no model\.safetensors; give the folder of a finished run"):
        _ = halfmoon.Results(tmp_path, []).model


def test_one_name_in_place_of_a_list_is_named() -> None:
    """A text is a sequence of letters: "f" would be the first method."""
    with pytest.raises(halfmoon.UserError, match="methods is 'fedavg': it must be a list of names"):
        halfmoon.compare("fedavg")


def test_a_split_says_who_holds_what() -> None:
    split = halfmoon.Split(np.array([0, 0, 1, -1, -2]), np.array([True, False, False, False, True]), 2)
    assert split.counts() == [("server", 1, 0), ("nobody", 0, 1), ("client 0", 1, 1), ("client 1", 0, 1)]
    assert "client 1: 0 labeled, 1 unlabeled" in repr(split)


def test_parts_are_printed_short() -> None:
    assert repr(halfmoon.Config(rounds=3)) == "Config(rounds=3, labels_per_class=0.5)"
    problem = halfmoon.problem(halfmoon.Config())
    for part in (problem.source, problem.source.test, problem):
        assert len(repr(part)) < 1000


def test_the_table_of_a_notebook_escapes_titles() -> None:
    line = Progress(Path(), "<b>", 10, 0, 0.0)
    line.add({"round": 5, "test": {"accuracy": 0.5}})
    page = python_progress.progress_table([line], 10.0)
    assert "<b>" not in page
    assert all(message in page for message in ('value="5" max="10"', "50.0 %", "0:10 left"))


def test_images_in_memory_become_a_folder_that_runs_read(tmp_path: Path) -> None:
    """To the pixel, with class names and labels that no one knows; the same images again leave the files alone."""
    digits = halfmoon.load_data("digits")
    labels = digits.train.labels[:300].copy()
    labels[:5] = -1
    train = halfmoon.Images(digits.train.images[:300], labels)
    test = digits.test
    names = [f"digit {n}" for n in range(10)]
    folder = halfmoon.save_data(tmp_path / "mine", train, test, names, validation=test)
    found = halfmoon.load_data(str(folder))
    assert np.array_equal(found.train.images, train.images)
    assert np.array_equal(found.train.labels, labels)
    assert np.array_equal(found.test.images, test.images)
    assert found.classes == tuple(names)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    halfmoon.save_data(folder, train, test, names, validation=test)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    whole = halfmoon.save_data(tmp_path / "whole", digits.train, test, names, validation=test)
    options = {"method": "fedavg", "network": "small", "validation_part": True, **SMALL}
    assert halfmoon.run(data=str(whole), run_dir=tmp_path / "run", **options).summaries[0]["accuracy"]["chosen"] > 0
    with pytest.raises(halfmoon.UserError, match=r"^data is numpy.ndarray: it must be a name, a folder, \(X, y\)"):
        halfmoon.compare(METHODS, data=train.images)
    with pytest.raises(halfmoon.UserError, match=r"^rounds in Config.of is .{9,140} \.\.\.: it must be a whole number"):
        halfmoon.run(method="fedavg", rounds=train.images)
    with pytest.raises(halfmoon.UserError, match=r"row 5 of train has label .*, but the 1 classes"):
        halfmoon.save_data(tmp_path / "wrong", train, test, ["one"])
    (tmp_path / "file").touch()
    with pytest.raises(halfmoon.UserError, match="file: it cannot be written"):
        halfmoon.save_data(tmp_path / "file", train, test, names)


def test_metrics_have_readable_names_and_units(pair: halfmoon.Results) -> None:
    table = pair.to_frame()
    units = dict(zip(table["metric"], table["unit"], strict=True))
    assert {"accuracy", "training_loss", "pseudo_label_accuracy", "used_share", "megabytes_sent", "seconds"} <= set(
        units
    )
    assert (units["accuracy"], units["used_share"], units["megabytes_sent"], units["seconds"]) == ("%", "%", "MB", "s")
    rows = read_rows(pair.runs[0] / "metrics.jsonl")
    losses = table[(table["run"] == pair.runs[0].name) & (table["metric"] == "training_loss")]
    assert list(losses["value"]) == [row["train"]["loss"] for row in rows]


def test_plots_are_figures_and_files(pair: halfmoon.Results, tmp_path: Path) -> None:
    for name, start in (("a.png", b"\x89PNG"), ("b.pdf", b"%PDF"), ("c.svg", b"<?xml")):
        figure = pair.plot(path=tmp_path / name)
        assert isinstance(figure, Figure)
        assert (tmp_path / name).read_bytes().startswith(start)
        before = (tmp_path / name).read_bytes()
        pair.plot(path=tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(halfmoon.UserError, match=r"d\.jpg does not end in \.png, \.pdf, \.svg"):
        pair.plot(path=tmp_path / "d.jpg")
    pseudo, used = pair.plot("pseudo_labels").axes
    assert (pseudo.get_title("left"), used.get_title("left")) == ("pseudo label accuracy (%)", "used share (%)")
    assert len(pseudo.lines) == 1  # labels only has no pseudo-labels
    with pytest.raises(halfmoon.UserError, match="no run has values of 'epsilon': accuracy, "):
        pair.plot("epsilon")


def test_pseudo_labels_without_hidden_labels_have_their_used_share(
    pair: halfmoon.Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the true labels of unlabeled images are unknown, their accuracy is too: one axis is drawn, not an error."""
    series = StoredRun.series
    monkeypatch.setattr(
        StoredRun,
        "series",
        lambda run, group, name: {} if (group, name) == ("pseudo", "accuracy") else series(run, group, name),
    )
    (used,) = pair.plot("pseudo_labels").axes
    assert used.get_title("left") == "used share (%)"


def test_each_client_is_a_dot(pair: halfmoon.Results) -> None:
    axes = pair.plot("clients").axes[0]
    each = [run["client_accuracy"]["each"] for run in pair.summaries]
    dots = [
        dot for collection in axes.collections for dot in collection.get_offsets() if len(collection.get_offsets()) > 1
    ]
    heights = sorted(float(height) for _, height in dots)
    expected = sorted(100 * share for values in each for share in values.values())
    assert heights == pytest.approx(expected)
    with pytest.raises(halfmoon.UserError, match="no finished run has accuracies of single clients"):
        halfmoon.Results(pair.folder, []).plot("clients")


def test_a_latex_table_has_heads_and_the_best_in_bold(pair: halfmoon.Results, tmp_path: Path) -> None:
    text = pair.to_latex(tmp_path / "table.tex")
    assert (tmp_path / "table.tex").read_text() == text
    lines = text.splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrr}"
    assert lines[2] == r"Method & seeds & accuracy (\%) & best (\%) & used (\%) & sent (MB) \\"
    accuracies = pair.summary["accuracy (%)"]
    best = [line for line in lines if "textbf" in line]
    assert len(best) == (accuracies == accuracies.max()).sum()
    assert rf"\textbf{{{accuracies.max():.2f} $\pm$ " in best[0]
    with pytest.raises(halfmoon.UserError, match="no run is finished"):
        halfmoon.Results(tmp_path, []).to_latex()


def test_equal_accuracies_are_both_in_bold_and_an_upper_bound_is_not() -> None:
    summary = pd.DataFrame({"accuracy (%)": [70.0, 60.0, 70.0, 80.0]}, index=["a", "b", "c", "all labels"])
    cells = results._format_accuracies(summary, ["70.00", "60.00", "70.00", "80.00"], {"all labels"})
    assert cells == [r"\textbf{70.00}", "60.00", r"\textbf{70.00}", "80.00"]


def test_messages_are_plain_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """To stderr, in a notebook to stdout, and with Python's names of options."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        python_progress.print_message(OptionText("give {clients=2}.", "clients"))
        assert capsys.readouterr() == ("", "halfmoon: give clients=2.\n")
        python_progress.print_message("give more clients.", show=False)
        assert capsys.readouterr() == ("", "")
        monkeypatch.setattr(python_progress, "in_notebook", lambda: True)
        python_progress.print_message(OptionText("give {clients=2}.", "clients"))
        assert capsys.readouterr() == ("halfmoon: give clients=2.\n", "")
        with python_progress.make_progress(show=False) as screen:
            screen.record("message", "give --clients 2.")
    assert capsys.readouterr() == ("", "")
