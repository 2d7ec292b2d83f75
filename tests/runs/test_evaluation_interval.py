"""Where nobody says how often, a large test set is evaluated as often as a tenth of the work allows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from halfmoon.config.schema import Config
from halfmoon.runs import budgets, factory, runner

CONFIG = Config(
    data="digits", method="fedavg", clients=10, cohort=4, steps=8, labeled_batch=10, unlabeled_batch=30,
    labels_per_class=4.0, rounds=7, threads=1, width=4,
)  # fmt: skip
"""A step passes 10 images once forward and once backward, which counts twice: 4 x 8 x 30 = 960 passes a round."""


@pytest.mark.parametrize(
    ("changes", "interval"),
    [({}, 4), ({"rounds": 2}, 2), ({"evaluate_every": 3}, 3), ({"reference": "fedavg-fixmatch"}, 1)],
)
def test_the_interval_is_the_hand_counted_one(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], interval: int
):
    """360 test images against a tenth of 960 passes; FixMatch passes 30 images three times and 30 once more."""
    monkeypatch.setattr(budgets, "MIN_IMAGES_FOR_INTERVAL", 0)
    config = replace(CONFIG, **changes)
    assert budgets.choose_evaluation_interval(config, factory.build_problem(config)) == interval


def test_small_test_sets_are_evaluated_after_each_round():
    assert budgets.choose_evaluation_interval(CONFIG, factory.build_problem(CONFIG)) == 1


def test_interval_is_recorded_and_does_not_change_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    each = runner.start(replace(CONFIG, run_dir=tmp_path / "each"))
    monkeypatch.setattr(budgets, "MIN_IMAGES_FOR_INTERVAL", 0)
    rare = runner.start(replace(CONFIG, run_dir=tmp_path / "rare"))
    rows = [json.loads(line) for line in (tmp_path / "rare/metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows if "test" in row] == [4, 7]
    assert rare.summaries[0]["accuracy"]["last"] == each.summaries[0]["accuracy"]["last"]
