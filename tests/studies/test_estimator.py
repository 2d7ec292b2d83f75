"""The scikit-learn estimator: scikit-learn's checks, equality with pooled solutions, marks of unlabeled rows, errors."""

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import check_classifiers_classes, check_estimator

import halfmoon
from halfmoon import FederatedClassifier, UserError
from halfmoon.data import memory
from halfmoon.data.partition.split import Split
from halfmoon.runs import vectors

HEADS = ("ridge-head", "mixture-head")

EXPECTED_FAILURES = {
    "check_classifiers_classes": "its labels -1 and 1 have the mark of unlabeled rows; the check exempts scikit-learn's "
    "semi-supervised classifiers by their names"
}


def make_data(rows: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return vectors (rows, 12) of unequal means and spreads, and their three classes."""
    g = np.random.default_rng(seed)
    y = g.integers(0, 3, rows)
    x = g.normal(size=(rows, 12)) + 1.2 * np.random.default_rng(9).normal(size=(3, 12))[y]
    return x * np.geomspace(0.01, 100, 12) + np.linspace(-1e3, 1e3, 12), y


def hide(y: np.ndarray, labeled: int) -> np.ndarray:
    """Return labels with the mark -1 after the first `labeled` rows."""
    return np.where(np.arange(len(y)) < labeled, y, -1)


def outputs(model: FederatedClassifier, x: np.ndarray) -> np.ndarray:
    return model.model_.logits(x)


@pytest.mark.parametrize("method", ["ridge-head", pytest.param("mixture-head", marks=pytest.mark.nightly)])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks_pass(method: str) -> None:
    results = check_estimator(
        FederatedClassifier(method), expected_failed_checks=EXPECTED_FAILURES, on_skip=None, on_fail="raise"
    )
    statuses = {result["check_name"]: result["status"] for result in results}
    assert len(statuses) > 40
    assert {name for name, status in statuses.items() if status == "xfail"} == EXPECTED_FAILURES.keys()
    # Skipped without the variable SCIPY_ARRAY_API, for every estimator.
    assert {name for name, status in statuses.items() if status == "skipped"} <= {"check_array_api_input"}
    # Under the name of an exempted class the check has labels without -1.
    check_classifiers_classes("SelfTrainingClassifier", FederatedClassifier(method))


def test_the_ridge_head_is_the_ridge_regression_of_pooled_standardized_vectors() -> None:
    x, y = make_data()
    labels = hide(y, 60)
    model = FederatedClassifier("ridge-head", n_clients=10, options={"strength": 0.3}).fit(x, labels)
    standardized = StandardScaler().fit_transform(x) / np.sqrt(12)
    pooled = Ridge(alpha=0.3).fit(standardized[:60], np.eye(3)[y[:60]])
    np.testing.assert_allclose(outputs(model, x), pooled.predict(standardized), rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", ["ridge-head", pytest.param("mixture-head", marks=pytest.mark.nightly)])
def test_ten_ways_to_split_rows_over_clients_give_the_pooled_head(method: str) -> None:
    x, y = make_data()
    labels = hide(y, 30)
    g = np.random.default_rng(1)
    ways = [g.integers(0, count, 300) for count in (2, 3, 5, 10, 20)]
    ways += [y, y * 10 + g.integers(0, 2, 300), np.where(labels < 0, 0, 1), (20 * g.random(300) ** 4).astype(int)]
    ways.append(np.arange(300) % 40)
    pooled = FederatedClassifier(method, n_clients=1).fit(x, labels)
    assert pooled.n_clients_ == 1
    for clients in ways:
        model = FederatedClassifier(method).fit(x, labels, clients=[f"site {number}" for number in clients])
        assert model.n_clients_ == len(np.unique(clients))
        np.testing.assert_allclose(outputs(model, x), outputs(pooled, x), rtol=0, atol=1e-9)


def test_one_client_gives_the_mixture_of_pooled_data() -> None:
    """The same EM in NumPy, on all rows together."""
    x, y = make_data()
    labels = hide(y, 30)
    h = (x - x.mean(0)) / x.std(0) / np.sqrt(12)
    labeled = h[:30]
    rest = h[30:]
    onehot = np.eye(3)[y[:30]]
    share = onehot.mean(0)
    centered = labeled - labeled.mean(0)
    w = np.linalg.solve(centered.T @ centered + np.eye(12), centered.T @ (onehot - share))
    b = -labeled.mean(0) @ w

    def scale(w: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = h @ w + b
        spread = np.sqrt(((logits - logits.mean(1, keepdims=True)) ** 2).mean())
        return w / spread, b / spread

    ridge = scale(w, b)
    trust = 10 / (10 + 25)
    weight = trust / (1 - trust) * 270 / 30
    z = np.concatenate([rest, labeled])
    w = 4 * ridge[0]
    b = 4 * ridge[1]
    correction = np.zeros(3)
    for step in range(10):
        e = np.exp(rest @ w + b)
        r = e / e.sum(1, keepdims=True)
        correction = 0.7 * correction - 0.3 * np.log(3 * r.mean(0))
        weights = np.concatenate([r, weight * onehot])
        mu = weights.T @ z / weights.sum(0)[:, None]
        cov = sum((weights[:, k, None] * (z - mu[k])).T @ (z - mu[k]) for k in range(3)) / weights.sum()
        cov = 0.8 * cov + 0.2 * np.trace(cov) / 12 * np.eye(12)
        slopes = np.linalg.solve(cov, mu.T)
        mixture = scale(slopes, -0.5 * (mu.T * slopes).sum(0))
        w, b = scale(*(trust * one + (1 - trust) * two for one, two in zip(ridge, mixture, strict=True)))
        sharpness = 4 + 2 * min(step + 1, 9) / 9
        w = sharpness * w
        b = sharpness * b + correction
    # Logits are centered over classes, as the scale of a head ignores their mean.
    logits = outputs(FederatedClassifier("mixture-head", n_clients=1).fit(x, labels), x)
    expected = h @ w + b
    np.testing.assert_allclose(
        logits - logits.mean(1, keepdims=True), expected - expected.mean(1, keepdims=True), rtol=0, atol=1e-9
    )


def test_recommended_is_the_mixture_with_unlabeled_rows_and_the_ridge_head_without() -> None:
    x, y = make_data()
    assert FederatedClassifier().fit(x, y).method_ == "ridge-head"
    semi = FederatedClassifier(random_state=0).fit(x, hide(y, 9))
    labels_only = FederatedClassifier("ridge-head", random_state=0).fit(x, hide(y, 9))
    assert semi.method_ == "mixture-head"
    assert labels_only.method_ == "ridge-head"
    test_x, test_y = make_data(seed=3)
    # Three labels a class of well separated Gaussians: unlabeled rows show where the classes are.
    assert semi.score(test_x, test_y) > labels_only.score(test_x, test_y) + 0.02


def test_probabilities_add_up_and_have_the_predicted_class_as_the_largest() -> None:
    x, y = make_data()
    for method in (*HEADS, "fedavg"):
        rounds = 5 if method == "fedavg" else None
        model = FederatedClassifier(method, rounds=rounds, random_state=0).fit(x, hide(y, 60))
        p = model.predict_proba(x)
        assert p.min() >= 0
        np.testing.assert_allclose(p.sum(1), 1)
        np.testing.assert_array_equal(model.classes_[p.argmax(1)], model.predict(x))
        assert np.log(p[np.arange(300), y].clip(1e-6)).mean() > np.log(1 / 3)


def test_a_linear_classifier_trained_by_steps_learns_at_clients_and_repeats_with_its_seed() -> None:
    x, y = make_data()
    labels = hide(y, 90)
    first = FederatedClassifier("fedavg", rounds=8, n_clients=3, random_state=4).fit(x, labels)
    repeated = FederatedClassifier("fedavg", rounds=8, n_clients=3, random_state=4).fit(x, labels)
    np.testing.assert_array_equal(outputs(first, x), outputs(repeated, x))
    assert first.score(x[90:], y[90:]) > 0.85
    shorter = FederatedClassifier(
        "fedavg", rounds=8, n_clients=3, random_state=4, options={"lr": 0.01, "labeled_batch": 5, "epochs": 2}
    ).fit(x, labels)
    assert np.abs(outputs(shorter, x)).max() < np.abs(outputs(first, x)).max()


@pytest.mark.parametrize("mark", [-1, "-1", "", None, np.nan])
def test_marks_of_unlabeled_rows_among_strings(mark: Any) -> None:
    x, y = make_data()
    names = np.array(["cat", "dog", "owl"], dtype=object)[y]
    names[30:] = mark
    expected = FederatedClassifier(random_state=0).fit(x, hide(y, 30))
    for labels in (names, list(names), pd.Series(names)):
        model = FederatedClassifier(random_state=0).fit(x, labels)
        assert model.method_ == "mixture-head"
        assert list(model.classes_) == ["cat", "dog", "owl"]
        np.testing.assert_array_equal(outputs(model, x), outputs(expected, x))
        assert set(model.predict(x)) <= {"cat", "dog", "owl"}


def test_classes_keep_their_numbers_and_booleans_are_classes() -> None:
    x, y = make_data()
    model = FederatedClassifier().fit(x, np.array([10, 2, 7])[y])
    assert list(model.classes_) == [2, 7, 10]
    assert model.score(x, np.array([10, 2, 7])[y]) > 0.9
    assert list(FederatedClassifier().fit(x, y == 1).classes_) == [False, True]


def test_it_fits_into_pipelines_searches_and_clones() -> None:
    x, y = make_data(120)
    model = FederatedClassifier("ridge-head", n_clients=3, options={"strength": 2.0}, random_state=1)
    copy = clone(model)
    assert copy.get_params() == model.get_params()
    assert copy.set_params(n_clients=4).n_clients == 4
    pipe = make_pipeline(FunctionTransformer(np.cbrt), model)
    pipe.fit(x, y, federatedclassifier__clients=y)
    assert pipe[-1].n_clients_ == 3
    search = GridSearchCV(model, {"options": [{"strength": 1e5}, {"strength": 0.1}]}, cv=3).fit(x, y, clients=y % 2)
    assert search.best_params_ == {"options": {"strength": 0.1}}
    assert search.best_estimator_.n_clients_ == 2
    assert cross_val_score(model, x, y, cv=3).mean() > 0.8


def test_rows_are_dealt_evenly_by_the_seed() -> None:
    model = FederatedClassifier(n_clients=4)
    labels = np.where(np.arange(14) < 6, 0, -1)
    dealt = [model._number_clients(None, labels, np.random.RandomState(seed))[0] for seed in (0, 0, 1)]
    assert sorted(np.bincount(dealt[0])) == [3, 3, 4, 4]
    assert sorted(np.bincount(dealt[0][:6])) == [1, 1, 2, 2]
    np.testing.assert_array_equal(dealt[0], dealt[1])
    assert (dealt[0] != dealt[2]).any()


def test_constant_features_and_more_clients_than_rows_do_no_harm() -> None:
    x, y = load_digits(n_class=3, return_X_y=True)
    assert (x.std(0) == 0).any()
    model = FederatedClassifier(n_clients=100).fit(x[:90], hide(y[:90], 60))
    assert model.score(x, y) > 0.85
    one = FederatedClassifier(n_clients=3).fit([[1.0, 2.0]], ["only"])
    assert list(one.predict([[5.0, 5.0]])) == ["only"]
    assert one.predict_proba([[5.0, 5.0]]).tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"method": "fedavg-fixmatch"}, "fedavg-fixmatch needs strong and weak views of images"),
        ({"method": "fedmatch"}, "fedmatch needs strong views of images"),
        ({"method": "supervised"}, "supervised is a baseline"),
        ({"method": "fedavgg"}, "did you mean 'fedavg'"),
        ({"method": "ridge-head", "rounds": 3}, "leave rounds out"),
        ({"method": "fedavg", "rounds": 0}, "rounds is 0"),
        ({"method": "ridge-head", "options": {"lr": 1}}, "ridge-head on vectors has no option 'lr'"),
        ({"method": "ridge-head", "options": {"strenght": 1}}, "did you mean 'strength'"),
        ({"method": "fedavg", "options": {"epochs": 0}}, "epochs is 0"),
        ({"method": "fedavg", "options": {"lr": -1}}, "lr is -1.0: it must be a number above 0"),
        ({"method": "fedavg", "options": {"lr": "fast"}}, "lr in options is"),
        ({"method": "ridge-head", "options": {"strength": -1}}, "strength is -1.0: it must be at least 0"),
        ({"method": "ridge-head", "options": {"strength": "big"}}, "strength in options is"),
        ({"method": "mixture-head", "options": {"even_labels": 0}}, "even_labels is 0.0"),
        ({"method": "mixture-head", "options": {"directions": 0}}, "directions is 0"),
        ({"method": "mixture-head", "options": {"shrinkage": 7}}, "shrinkage is 7.0: it must be from 0 to 1"),
        ({"method": "mixture-head", "options": {"em_rounds": -1}}, "em_rounds is -1"),
        ({"method": "mixture-head", "options": {"em_rounds": 2.5}}, "em_rounds in options is 2.5"),
        ({"n_clients": 0}, "n_clients is 0"),
        ({"n_clients": 2.5}, "n_clients is 2.5"),
    ],
)
def test_a_wrong_parameter_is_a_sentence(parameters: dict[str, Any], message: str) -> None:
    x, y = make_data(30)
    with pytest.raises(UserError, match=message):
        FederatedClassifier(**parameters).fit(x, y)


def test_numbers_of_numpy_are_options_and_a_head_without_a_solution_is_a_sentence() -> None:
    x, y = make_data(30)
    options = {"strength": np.float64(2), "directions": np.int64(3), "em_rounds": 0}
    FederatedClassifier("mixture-head", options=options).fit(x, hide(y, 9))
    with pytest.raises(UserError, match="set strength in options above 0"):
        FederatedClassifier("ridge-head", options={"strength": 0}).fit(np.hstack([x, 0 * x]), y)


def test_vectors_that_are_not_writable_cause_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    x, y = make_data(30)
    x.flags.writeable = False
    FederatedClassifier("ridge-head").fit(x, y)
    assert not [warning.message for warning in recwarn]


def test_wrong_labels_and_clients_are_a_sentence() -> None:
    x, y = make_data(30)
    for labels, message in (
        (np.full(30, -1), "y has no labeled row"),
        ([None] * 30, "y has no labeled row"),
        (np.array(["a", 1] * 15, dtype=object), "y mixes strings and numbers"),
        (np.linspace(0, 1, 30), "Unknown label type"),
        (np.where(y == 0, np.nan, 1.0), "y contains NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            FederatedClassifier().fit(x, labels)
    with pytest.raises(UserError, match="clients of 3 rows, but X has 30"):
        FederatedClassifier().fit(x, y, clients=[0, 1, 2])
    with pytest.raises(UserError, match="a row without a client"):
        FederatedClassifier().fit(x, y, clients=[None] + ["a"] * 29)


def test_without_scikit_learn_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "halfmoon.studies.estimator")
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(
        UserError, match=r"needs scikit-learn 1.6 or later: pip install -c constraints.txt '.\[sklearn\]'"
    ):
        _ = halfmoon.FederatedClassifier
    # `from halfmoon import *` then leaves the name out.
    assert "FederatedClassifier" in runpy.run_path(halfmoon.__file__)["__all__"]
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else find(name))
    assert "FederatedClassifier" not in runpy.run_path(halfmoon.__file__)["__all__"]


def test_training_on_vectors_checks_the_layout_of_options() -> None:
    training = vectors.build_training("mixture-head", {"em_rounds": 2}, None)
    assert training.rounds == 3
    x, y = make_data(40)
    split = Split(np.zeros(40, np.int64), np.ones(40, bool), 1)
    model = vectors.train(training, x, y.astype(np.int64), split, seed=0)
    # No unlabeled vector: the ridge head's directions remain.
    assert (model.logits(x).argmax(1) == y).mean() > 0.8


IMAGE_OPTIONS = {"network": "small", "steps": 2, "threads": 1, "cohort": 2, "lr": 1e-2}


def digit_images(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` images of three digits, float64 (count, 8, 8) from 0 to 1, and their names."""
    images, digits = load_digits(n_class=3, return_X_y=True)
    return images[:count].reshape(-1, 8, 8) / 16, np.array(["nil", "one", "two"], dtype=object)[digits[:count]]


def test_images_train_as_halfmoon_run_does(tmp_path: Path) -> None:
    x, y = digit_images(60)
    y[30:] = None
    clients = np.arange(60) % 2
    known = len(memory._registered)
    model = FederatedClassifier("fedavg-fixmatch", rounds=2, random_state=3, options=IMAGE_OPTIONS)
    model.fit(x, y, clients=clients)
    assert (model.method_, model.n_clients_, model.n_features_in_) == ("fedavg-fixmatch", 2, 64)
    numbers = pd.Series(y).map({"nil": 0, "one": 1, "two": 2}).fillna(-1).astype(int).to_numpy()
    seed = int(np.random.RandomState(3).randint(2**31 - 1))
    pixels = np.floor(x * 255 + 0.5).astype(np.uint8)
    expected = halfmoon.run(
        data=(pixels, numbers),
        test=(pixels[:3], numbers[:3]),
        clients=clients,
        seed=seed,
        method="fedavg-fixmatch",
        rounds=2,
        progress=False,
        run_dir=tmp_path / "run",
        **IMAGE_OPTIONS,
    )
    p = model.predict_proba(x)
    np.testing.assert_array_equal(p, expected.model.predict_proba(pixels[..., None]))
    np.testing.assert_array_equal(model.predict(x), model.classes_[p.argmax(1)])
    assert list(model.classes_) == ["nil", "one", "two"]
    # The registry retains the arrays of `halfmoon.run` for `resume`, but not those of fits.
    assert len(memory._registered) == known + 1
    # One image remains a batch, and lists of PIL images are the same images.
    np.testing.assert_allclose(model.predict_proba(x[:1]), p[:1], atol=1e-6)
    np.testing.assert_allclose(model.predict_proba([Image.fromarray(one) for one in pixels]), p, atol=1e-6)
    with pytest.raises(UserError, match="trained on images"):
        model.predict(x.reshape(60, 64))


def test_recommended_on_images() -> None:
    x, y = digit_images(40)
    parameters = {"n_clients": 2, "rounds": 1, "options": IMAGE_OPTIONS, "random_state": 0}
    assert FederatedClassifier(**parameters).fit(x, y).method_ == "fedavg"
    y[20:] = None
    assert FederatedClassifier(**parameters).fit(x, y).method_ == "fedavg-soft-labels"
    with pytest.raises(UserError, match="options has 'seed'"):
        FederatedClassifier(options={"seed": 1}).fit(x, y)


def test_masked_labels_are_unlabeled_and_masked_values_are_refused() -> None:
    vectors = np.random.default_rng(0).random((40, 4))
    labels = np.arange(40) % 2
    hidden = np.ma.array(labels, mask=np.arange(40) >= 20)
    fitted = halfmoon.FederatedClassifier().fit(vectors, hidden)
    marked = halfmoon.FederatedClassifier().fit(vectors, np.where(np.arange(40) >= 20, -1, labels))
    assert fitted.method_ == marked.method_ == "mixture-head"
    with pytest.raises(ValueError, match="masked values"):
        halfmoon.FederatedClassifier().fit(np.ma.array(vectors, mask=vectors > 0.5), labels)
