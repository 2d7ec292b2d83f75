"""The sentence at the end of a comparison, and the table that fits a terminal."""

from dataclasses import replace
from typing import Any

import pytest

from halfmoon.report import remarks as module
from halfmoon.report import tables

TITLES = {"fedavg": "FedAvg (labeled only)", "fedavg-sl": "FedAvg-SL (all labels)", "feddure": "FedDure"}


def gain(runs: list[dict[str, Any]]) -> str | None:
    return module.gain(runs, ("fedavg-sl", "fedprox-sl", "supervised"))


def summary(method: str, last: float, seed: int = 0, **more: float) -> dict[str, Any]:
    cost = dict.fromkeys(("labeled_steps", "forward", "backward", "bytes_down", "bytes_up"), 1_234_567)
    accuracy = {"last": last, "best": last, "best_round": 1, **more}
    return {"method": method, "title": TITLES[method], "seed": seed, "accuracy": accuracy, "cost": cost}


def three(floor: float, method: float, top: float) -> list[dict[str, Any]]:
    return [summary("feddure", method), summary("fedavg", floor), summary("fedavg-sl", top)]


def test_the_share_of_the_way_is_said_in_a_sentence():
    said = gain(three(0.861, 0.915, 0.956))
    assert said == "FedDure won 5.4 of the 9.5 points between FedAvg (labeled only) and FedAvg-SL (all labels)."
    assert gain(three(0.861, 0.851, 0.956)) == "FedDure ended 1.0 points below FedAvg (labeled only)."


def test_a_method_above_all_labels_has_won_no_part_of_a_way():
    """5.6 of 2.5 points are no share: all labels were not trained to their end."""
    assert gain(three(0.7, 0.756, 0.725)) == (
        "FedDure ended 5.6 points above FedAvg (labeled only) and 3.1 above FedAvg-SL (all labels). "
        "All labels are no upper bound here: more rounds or another rate would be needed."
    )


def test_it_is_said_of_the_mean_over_the_seeds():
    runs = [*three(0.8, 0.9, 1.0), *[{**each, "seed": 1} for each in three(0.7, 0.7, 0.9)]]
    assert gain(runs) == (
        "FedDure won 5.0 of the 20.0 points between FedAvg (labeled only) and FedAvg-SL (all labels), "
        "in the mean of 2 seeds."
    )


@pytest.mark.parametrize("missing", ["feddure", "fedavg", "fedavg-sl"])
def test_nothing_is_said_where_one_of_the_three_is_missing(missing: str):
    assert gain([each for each in three(0.8, 0.9, 1.0) if each["method"] != missing]) is None
    assert gain(three(0.8, 0.9, 0.8)) is None


def test_the_table_fits_80_columns_and_shows_the_chosen_round_where_there_is_one():
    runs = [{**each, "seed": seed} for seed in (0, 1) for each in three(0.861, 0.915, 0.956)]
    table = tables.comparison(runs)
    narrow = replace(table, wide=False)
    assert narrow.headings == ["method", "last %", "labeled steps", "over"]
    assert sum(2 + max(map(len, column)) for column in zip(narrow.headings, *narrow.cells, strict=True)) <= 82
    assert "chosen %" not in table.headings
    chosen = [summary("feddure", 0.9, seed, chosen=0.95, chosen_round=3) for seed in (0, 1)]
    narrow = replace(tables.comparison(chosen), wide=False)
    assert narrow.cells == [["FedDure", "90.00 ± 0.00", "95.00 ± 0.00", "1,234,567", "2 seeds"]]
    assert sum(2 + max(map(len, column)) for column in zip(narrow.headings, *narrow.cells, strict=True)) <= 82
