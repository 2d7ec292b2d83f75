"""What is said under a comparison: the budget, a ceiling below the floor, thresholds that nobody passes."""

import pytest

from halfmoon.report.remarks import most_used, remarks

TITLES = {"fedavg": "FedAvg (labeled only)", "fedavg-fixmatch": "FedAvg + FixMatch", "fedavg-sl": "FedAvg-SL"}


def run(method, last, used=None, rule="labeled-steps", seed=0):
    said = {} if used is None else {"most_used": used}
    budget = {"rule": rule, "reference": "FedAvg-SL"}
    names = {"method": method, "title": TITLES[method], "seed": seed}
    return {**names, "accuracy": {"last": last}, "budget": budget, **said}


def test_the_budget_says_whose_it_is():
    runs = [run("fedavg", 0.5), run("fedavg-sl", 0.9)]
    assert remarks(runs, ["fedavg-sl"]) == ["Budget: as many labeled steps for all as FedAvg-SL takes by its own rule."]
    forwards = [run("fedavg", 0.5, rule="forwards"), run("fedavg-sl", 0.9, rule="forwards")]
    assert remarks(forwards, ["fedavg-sl"])[0].startswith("Budget: as many images through the classifier")
    alone = [run("fedavg", 0.5, rule="none"), run("fedavg-sl", 0.9, rule="none")]
    assert remarks(alone, ["fedavg-sl"]) == ["Budget: each method took what the batch rule gives it."]
    assert remarks(runs[:1], ["fedavg-sl"]) == []


def test_a_ceiling_below_the_floor_is_said_in_the_mean_over_seeds():
    """70 and 76 are 73 in the mean, below 74; 75 and 76 are not."""
    floor = [run("fedavg", 0.74, seed=seed) for seed in (0, 1)]
    sunk = remarks([*floor, run("fedavg-sl", 0.70), run("fedavg-sl", 0.76, seed=1)], ["fedavg-sl"])
    assert sunk[1].startswith("FedAvg-SL ends at 73.0 %, not above labels alone (74.0 %)")
    assert "a decaying learning rate" in sunk[1]
    assert len(remarks([*floor, run("fedavg-sl", 0.75), run("fedavg-sl", 0.76, seed=1)], ["fedavg-sl"])) == 1


@pytest.mark.parametrize(("used", "said"), [(0.0, True), (0.01, True), (0.02, False), (None, False)])
def test_a_threshold_that_nobody_passes_is_said(used, said):
    found = remarks([run("fedavg", 0.7), run("fedavg-fixmatch", 0.7, used)], [])
    assert any("passed the confidence threshold" in each and "FedAvg + FixMatch" in each for each in found) == said


def test_most_used_is_the_largest_share_of_any_round():
    rows = [{"pseudo": None}, {"pseudo": {"share_used": 0.01}}, {"pseudo": {"share_used": 0.2}}, {"round": 4}]
    assert most_used(rows) == 0.2
    assert most_used(rows[:1]) is None
