"""Paired differences, adjusted p-values and ranks against numbers derived by hand or printed in the papers."""

import base64

import numpy as np
import pytest
import scipy

from halfmoon.report import paired


def summary(method: str, seed: int, accuracy: float) -> dict:
    return {"method": method, "title": method.upper(), "seed": seed, "accuracy": {"last": accuracy / 100}}


def test_a_difference_is_students_t_of_the_pairs() -> None:
    """Differences 1, 2, 3: mean 2, s = 1, error 1/sqrt(3), t(0.975, 2) = 4.302653."""
    result = paired.compare_paired([11, 12, 13], [10, 10, 10])
    reach = 4.302653 / 3**0.5
    assert result[:3] == pytest.approx((2, 2 - reach, 2 + reach), abs=1e-6)
    assert result.p == pytest.approx(scipy.stats.ttest_rel([11, 12, 13], [10, 10, 10]).pvalue)


def test_overlapping_splits_widen_the_interval() -> None:
    """Nadeau and Bengio: the variance is (1/n + test/train) s^2, here (1/4 + 1/4) instead of 1/4."""
    actual = [3.0, 5.0, 4.0, 8.0]
    base = [1.0, 2.0, 3.0, 4.0]
    narrow = paired.compare_paired(actual, base)
    wide = paired.compare_paired(actual, base, test_train_ratio=0.25)
    assert wide.high - wide.mean == pytest.approx(2**0.5 * (narrow.high - narrow.mean))


def test_equal_results_have_no_difference() -> None:
    assert paired.compare_paired([1, 2], [1, 2]) == (0, 0, 0, 1)
    with pytest.raises(ValueError, match="cannot be paired"):
        paired.compare_paired([1], [2])


def test_the_interval_covers_the_truth_in_95_of_100() -> None:
    """2,000 comparisons of five seeds with a common split effect; 95 % within three standard errors (1.5 points)."""
    draw = np.random.default_rng(0)
    split = draw.normal(0, 5, (2000, 5))
    base = split + draw.normal(0, 1, split.shape)
    actual = split + 2 + draw.normal(0, 1, split.shape)
    covered = [r.low <= 2 <= r.high for r in map(paired.compare_paired, actual, base)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


def test_splits_and_images_give_the_mean_squares_of_the_table() -> None:
    """Differences [[1, 0, 1], [1, 1, 0]]: mean 2/3, S = 0, I = 1/6, R = 1/2; as I < R, S is left, which is 0.

    With [[1, 0], [1, 0], [1, 0]]: mean 1/2, S = R = 0 and I = 3/2: variance 3/2 / 6 = 1/4 with one degree of freedom.
    Where images add little, the interval of the splits is the wider one.
    """
    none = np.zeros((2, 3), bool)
    assert paired.compare_by_image(np.array([[1, 0, 1], [1, 1, 0]], bool), none)[:3] == pytest.approx([200 / 3] * 3)
    reach = scipy.stats.t.ppf(0.975, 1) * 50
    found = paired.compare_by_image(np.array([[1, 0]] * 3, bool), np.zeros((3, 2), bool))
    assert found[:3] == pytest.approx((50, 50 - reach, 50 + reach))
    table = np.array([[1, 0, 0], [1, 1, 0]], bool)
    assert paired.compare_by_image(table, none) == pytest.approx(paired.compare_paired(100 * table.mean(1), [0, 0]))
    with pytest.raises(ValueError, match="cannot be paired"):
        paired.compare_by_image(none, none[:1])


def test_an_interval_over_splits_and_images_covers_the_truth() -> None:
    """300 comparisons of five splits on 200 images some of which are hard: 93 % or more; splits alone cover less."""
    draw = np.random.default_rng(0)
    hits = np.zeros(2)
    for _ in range(300):
        image = draw.normal(0, 0.2, (2, 200))
        split = draw.normal(0, 0.01, (2, 5, 1))
        rights = [draw.random((5, 200)) < 0.7 + effect + each for effect, each in zip(image, split, strict=True)]
        accuracies = [100 * right.mean(1) for right in rights]
        for index, found in enumerate((paired.compare_by_image(*rights), paired.compare_paired(*accuracies))):
            hits[index] += found.low <= 0 <= found.high
    assert hits[0] / 300 > 0.93 > hits[1] / 300


def test_runs_with_correct_predictions_are_compared_by_image() -> None:
    rights = {"fedavg": [[1, 1, 0, 0], [1, 0, 0, 0]], "feddure": [[1, 1, 1, 0], [1, 1, 0, 1]]}
    runs = [
        {
            **summary(method, seed, 25 * sum(right)),
            "confusion": [[sum(right), 0], [4 - sum(right), 0]],
            "correct": base64.b64encode(np.packbits(right)).decode(),
        }
        for method, each in rights.items()
        for seed, right in enumerate(each)
    ]
    result = paired.compare_methods(runs)
    assert result.images == 4
    assert result.rows[0].difference == paired.compare_by_image(
        *(np.array(rights[name]) for name in ("feddure", "fedavg"))
    )
    assert paired.compare_methods([*runs[:3], {**runs[3], "correct": runs[0]["correct"]}]).images == 0, (
        "not of this run"
    )


def test_adjusted_intervals_exclude_zero_exactly_if_adjusted_p_is_below_5_percent() -> None:
    """Bonferroni by hand: the interval of k comparisons is that of level 1 - 0.05 / k, and p is k times as large."""
    actual = [3.0, 5.0, 4.0, 8.0]
    base = [1.0, 2.0, 3.0, 4.0]
    one = paired.compare_paired(actual, base)
    four = paired.compare_paired(actual, base, comparisons=4)
    assert four.p == pytest.approx(4 * one.p)
    error = np.std([2, 3, 1, 4], ddof=1) / 2
    assert four.high == pytest.approx(2.5 + scipy.stats.t.ppf(1 - 0.05 / 8, 3) * error)
    draw = np.random.default_rng(0)
    for _ in range(200):
        values = draw.normal(1, 1, 5)
        for comparisons in (1, 3, 10):
            found = paired.compare_paired(values, np.zeros(5), comparisons=comparisons)
            assert (found.p < 0.05) == (found.low > 0 or found.high < 0)
            assert found.p <= 1


def test_methods_are_compared_with_the_control_where_it_was_run() -> None:
    """Differences to the control for methods, and the control's own to labels only; both adjusted for two."""
    runs = [summary("fedavg", 0, 70), summary("fedavg", 1, 72), summary("fedavg-control", 0, 77)]
    runs += [summary("fedavg-control", 1, 77), summary("feddure", 0, 78), summary("feddure", 1, 80)]
    result = paired.compare_methods([*runs, summary("all", 0, 95), summary("all", 1, 95)], {"all"})
    assert (result.base, [row.method for row in result.rows]) == ("FEDAVG-CONTROL", ["FEDDURE"])
    assert result.rows[0].difference == paired.compare_paired([78, 80], [77, 77], comparisons=2)
    assert result.control == ("FEDAVG", paired.compare_paired([77, 77], [70, 72], comparisons=2))
    assert result.description.startswith("FEDAVG-CONTROL against FEDAVG: +6.0 points (")
    assert "adjusted for 2 comparisons" in result.description
    assert result.as_json()["control"]["mean"] == 6
    assert paired.compare_methods(runs[2:]).control is None, "labels only was not run"


def test_methods_are_compared_with_labels_only_on_common_seeds() -> None:
    runs = [summary("feddure", 0, 80), summary("feddure", 1, 84), summary("feddure", 2, 99)]
    runs += [summary("fedavg", 0, 78), summary("fedavg", 1, 80), summary("all", 0, 95), summary("all", 1, 95)]
    result = paired.compare_methods(runs, {"all"})
    assert (result.base, result.seeds, [row.method for row in result.rows]) == ("FEDAVG", 2, ["FEDDURE"])
    assert result.rows[0].difference.mean == pytest.approx(3)
    assert paired.compare_methods(runs[:1] + runs[3:4]) is None


def test_ranks_and_critical_difference_of_demsars_example() -> None:
    """Demsar 2006, section 3.2.2: four methods on 14 data sets have a critical difference of 1.25."""
    draw = np.random.default_rng(1)
    result = paired.rank_methods({name: draw.random(14) for name in "abcd"})
    assert result.critical == pytest.approx(1.25, abs=0.005)
    assert sum(result.means.values()) == pytest.approx(10)
    best = paired.rank_methods({"a": [3, 3], "b": [2, 2], "c": [1, 1]})
    assert best.means == {"a": 1, "b": 2, "c": 3}
