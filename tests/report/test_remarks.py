"""What is reported under a comparison: what was won, the budget, a sunk ceiling, thresholds that nobody passes."""

from dataclasses import replace
from typing import Any

import pytest

from halfmoon.report import remarks as module
from halfmoon.report.remarks import list_remarks, summarize_pseudo_labels
from halfmoon.report.tables import comparison_table

TITLES = {
    "fedavg": "FedAvg (labeled only)",
    "fedavg-control": "Labels-only control",
    "fedavg-fixmatch": "FedAvg + FixMatch",
    "fedavg-sl": "FedAvg-SL (all labels)",
    "feddure": "FedDure",
}
COST = dict.fromkeys(("labeled_steps", "forward", "backward", "bytes_down", "bytes_up"), 1_234_567)


def gain(runs: list[dict[str, Any]]) -> str | None:
    return module.describe_gain(runs, ("fedavg-sl", "fedprox-sl", "supervised"))


def run(method: str, last: float, used: float | None = None, rule: str = "labeled-steps", seed: int = 0) -> dict:
    metadata = {"method": method, "title": TITLES[method], "seed": seed, "cost": COST}
    metadata |= {"accuracy": {"last": last, "best": last}, "budget": {"rule": rule, "reference": "FedAvg-SL"}}
    return metadata if used is None else {**metadata, "most_used": used}


def three(floor: float, method: float, top: float, seed: int = 0) -> list[dict[str, Any]]:
    return [run("feddure", method, seed=seed), run("fedavg", floor, seed=seed), run("fedavg-sl", top, seed=seed)]


def test_gain_is_relative_to_that_of_all_labels():
    text = gain(three(0.861, 0.915, 0.956))
    assert text == "FedDure gained 5.4 of the 9.5 points between FedAvg (labeled only) and FedAvg-SL (all labels)."
    assert gain(three(0.861, 0.851, 0.956)) == "FedDure is 1.0 points below FedAvg (labeled only)."
    assert gain(three(0.861, 0.86099, 0.956)) == "FedDure has the same accuracy as FedAvg (labeled only)."


def test_method_above_all_labels_has_no_relative_gain():
    """5.6 of 2.5 points are no share: all labels were not trained to their end."""
    assert gain(three(0.7, 0.756, 0.725)) == (
        "FedDure is 5.6 points above FedAvg (labeled only) and 3.1 above FedAvg-SL (all labels). "
        "All labels are no upper bound here: more rounds or another learning rate would be needed."
    )


def test_gain_is_the_mean_over_seeds():
    assert gain([*three(0.8, 0.9, 1.0), *three(0.7, 0.7, 0.9, seed=1)]) == (
        "FedDure gained 5.0 of the 20.0 points between FedAvg (labeled only) and FedAvg-SL (all labels), "
        "in the mean of 2 seeds."
    )


def test_the_gain_is_that_over_the_control_where_it_was_run():
    assert gain([*three(0.861, 0.915, 0.956), run("fedavg-control", 0.9)]) == (
        "FedDure gained 1.5 of the 5.6 points between Labels-only control and FedAvg-SL (all labels). "
        "Labels-only control is 3.9 points above FedAvg (labeled only): this is the effect of unlabeled images in "
        "batch normalization."
    )
    without_labels_only = [run("feddure", 0.8), run("fedavg-control", 0.9), run("fedavg-sl", 0.95)]
    assert gain(without_labels_only) == "FedDure is 10.0 points below Labels-only control."


@pytest.mark.parametrize("missing", ["feddure", "fedavg", "fedavg-sl"])
def test_no_gain_if_one_of_the_three_methods_is_missing(missing: str):
    assert gain([each for each in three(0.8, 0.9, 1.0) if each["method"] != missing]) is None
    assert gain(three(0.8, 0.9, 0.8)) is None


def test_the_table_fits_80_columns_and_shows_the_chosen_round_where_there_is_one():
    runs = [each for seed in (0, 1) for each in three(0.861, 0.915, 0.956, seed)]
    table = comparison_table(runs)
    assert replace(table, wide=False).headings == ["method", "last %", "labeled steps", "over"]
    assert "chosen %" not in table.headings
    for each in runs:
        each["accuracy"]["chosen"] = 0.95
    narrow = replace(comparison_table(runs), wide=False)
    assert narrow.cells[0] == ["FedDure", "91.50 ± 0.00", "95.00 ± 0.00", "1,234,567", "2 seeds"]
    assert sum(2 + max(map(len, column)) for column in zip(narrow.headings, *narrow.cells, strict=True)) <= 82


def test_budget_names_its_reference():
    runs = [run("fedavg", 0.5), run("fedavg-sl", 0.9)]
    assert list_remarks(runs, ["fedavg-sl"]) == [
        "Budget: each method has as many labeled steps as FedAvg-SL by its batch rule."
    ]
    forwards = [run("fedavg", 0.5, rule="forwards"), run("fedavg-sl", 0.9, rule="forwards")]
    assert list_remarks(forwards, ["fedavg-sl"])[0].startswith(
        "Budget: each method has as many images through the classifier"
    )
    single = [run("fedavg", 0.5, rule="none"), run("fedavg-sl", 0.9, rule="none")]
    assert list_remarks(single, ["fedavg-sl"]) == [
        "Budget: each method trained for the steps that its batch rule gives."
    ]
    assert list_remarks(runs[:1], ["fedavg-sl"]) == []


def test_remark_on_an_upper_bound_below_labels_only():
    """70 and 76 are 73 in the mean, below 74; 75 and 76 are not."""
    floor = [run("fedavg", 0.74, seed=seed) for seed in (0, 1)]
    sunk = list_remarks([*floor, run("fedavg-sl", 0.70), run("fedavg-sl", 0.76, seed=1)], ["fedavg-sl"])
    assert sunk[1].startswith("FedAvg-SL (all labels) has 73.0 %, not more than labels only (74.0 %)")
    assert "a decaying learning rate" in sunk[1]
    assert len(list_remarks([*floor, run("fedavg-sl", 0.75), run("fedavg-sl", 0.76, seed=1)], ["fedavg-sl"])) == 1


@pytest.mark.parametrize(("used", "message"), [(0.0, True), (0.01, True), (0.02, False), (None, False)])
def test_remark_on_unused_pseudo_labels(used, message):
    found = list_remarks([run("fedavg", 0.7), run("fedavg-fixmatch", 0.7, used)], [])
    assert any("passed the confidence threshold" in each and "FedAvg + FixMatch" in each for each in found) == message


@pytest.mark.parametrize(("right", "message"), [(0.6, True), (0.61, False)])
def test_remark_on_a_method_not_above_the_most_frequent_class(right: float, message: bool) -> None:
    """Six of ten test images are of one class: naming it always is right on 60 %."""
    found = list_remarks([{**run("feddure", right), "confusion": [[0, 3, 3], [0, 4, 0], [0, 0, 0]]}], [])
    assert found == (
        ["FedDure is right on 60.0 % of the test images; always predicting the most frequent class is right on 60.0 %. Train "
         "longer, or label more images."] if message else []
    )  # fmt: skip


def test_used_pseudo_labels_are_summarized_over_rounds():
    """Shares 0.01 and 0.2: 0.105 in the mean, at most 0.2; rounds without pseudo-labels do not count."""
    rows = [{"pseudo": None}, {"pseudo": {"share_used": 0.01}}, {"pseudo": {"share_used": 0.2}}, {"round": 4}]
    assert summarize_pseudo_labels(rows) == {"used": pytest.approx(0.105), "most_used": 0.2}
    assert summarize_pseudo_labels(rows[:1]) == {}


def test_table_shows_the_share_of_pseudo_labels_used_where_a_run_has_some():
    runs = [run("fedavg", 0.7), {**run("feddure", 0.8), "pseudo_labels": {"used": 0.5}}]
    table = replace(comparison_table(runs), wide=False)
    assert table.headings == ["method", "last %", "used %", "labeled steps", "over"]
    assert [row[2] for row in table.cells] == ["", "50.0"]
    runs[1]["pseudo_labels"] = {"used": 0.0}
    assert comparison_table(runs).cells[1][3] == "0.0"
