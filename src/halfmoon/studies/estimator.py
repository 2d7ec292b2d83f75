"""A scikit-learn classifier that is trained by a simulated federation."""

import tempfile
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from PIL import Image

from halfmoon.core.errors import UserError, install_command
from halfmoon.core.python_names import python_errors
from halfmoon.data import memory
from halfmoon.data.conversion import make_memory_data
from halfmoon.data.images import UNKNOWN
from halfmoon.data.partition.split import Split
from halfmoon.runs import vectors
from halfmoon.runs.vectors import LinearModel
from halfmoon.studies import python_api

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        assert_all_finite,
        check_consistent_length,
        check_is_fitted,
        column_or_1d,
        validate_data,
    )
except ImportError as error:
    raise UserError(
        f"halfmoon.FederatedClassifier needs scikit-learn 1.6 or later: {install_command('sklearn')}."
    ) from error

RECOMMENDED = "recommended"


class FederatedClassifier(ClassifierMixin, BaseEstimator):
    """A classifier of vectors or images, trained by clients that send no row to the server.

    The clients are simulated in this process. What each of them sends is what it would send in a federation: sums over
    its rows, or a trained model.

    Vectors are an array (N, D). Images are an array or tensor (N, H, W), (N, H, W, C) or (N, C, H, W), or a list of arrays
    or PIL images; `halfmoon.run` trains on them, in a temporary folder.

    Rows without a label are marked in y: -1 in numbers, as in `sklearn.semi_supervised`; -1, "-1", "", None or NaN among
    strings.

    Attributes:
        method: on vectors, ridge-head (labels only) and mixture-head (semi-supervised) solve a linear classifier from sums,
            so that the distribution of rows over clients does not change it; fedavg trains one by steps (labels only).
            On images, any method of `halfmoon.run`. recommended: on vectors mixture-head, on images the recommended
            method; without unlabeled rows ridge-head and fedavg.
        n_clients: number of clients to which rows are dealt at random; without effect if `fit` is called with clients.
        rounds: number of rounds of a method that trains by steps; None: 50 on vectors, the default of `halfmoon.run` on
            images.
        options: further options. On vectors those of the method (strength, even_labels, directions, shrinkage, em_rounds,
            prox) and, of one that trains by steps, lr, labeled_batch and epochs; on images those of `halfmoon.run`.
        random_state: seed of the clients' rows, of batches and of a network, as in scikit-learn.
        classes_: the classes, sorted, (K,).
        n_features_in_: number of features; of images, their height times width times channels.
        method_: name of the method that was trained.
        n_clients_: number of clients.
        model_: the trained model.

    Examples:
        >>> model = FederatedClassifier(n_clients=5).fit(X, y)
        >>> model.predict(X_new)
    """

    def __init__(
        self,
        method: str = RECOMMENDED,
        *,
        n_clients: int = 5,
        rounds: int | None = None,
        options: Mapping[str, Any] | None = None,
        random_state: Any = None,
    ) -> None:
        """Store `method`, `n_clients`, `rounds`, `options` and `random_state` as they are given.

        `fit` checks them, as scikit-learn demands of estimators.
        """
        self.method = method
        self.n_clients = n_clients
        self.rounds = rounds
        self.options = options
        self.random_state = random_state

    @python_errors
    def fit(self, X: Any, y: Any, clients: Any = None) -> "FederatedClassifier":
        """Train the classifier on labeled and unlabeled rows, divided among simulated clients.

        Args:
            X: vectors (N, D), or images: an array or tensor (N, H, W), (N, H, W, C) or (N, C, H, W), or a list.
            y: classes (N,); -1 among numbers, or -1, "-1", "", None or NaN among strings, for an unlabeled row.
            clients: the client of each row, (N,), numbers or names; None: rows are dealt to `n_clients` clients of equal
                size at random.

        Raises:
            UserError: the method cannot run on vectors, an option is wrong, no row is labeled, or images are invalid.
            Diverged: a loss or a weight is not finite.
        """
        if isinstance(X, pd.Series) or (isinstance(X, np.ndarray) and X.ndim == 1 and X.dtype == object):
            X = X.tolist()  # images as the elements of a table or of an array of objects
        if np.ma.is_masked(X):
            raise UserError("X has masked values: fill them, such as by X.filled(0).")
        is_images = _is_images(X)
        if not is_images:
            X = cast(np.ndarray, validate_data(self, cast(Any, X), dtype=np.float64))
        classes, labels = _number_classes(y, len(X), type(self).__name__)
        generator = check_random_state(self.random_state)
        numbers, count = self._number_clients(clients, labels, generator)  # the client of each row
        seed = int(generator.randint(2**31 - 1))  # of batches and of a network, other than that of the clients
        if is_images:
            self._fit_images(X, labels, numbers, seed)
        else:
            self._fit_vectors(X, labels, Split(client=numbers, labeled=labels != UNKNOWN, clients=count), seed)
        self.classes_ = classes
        self.n_clients_ = count
        return self

    @python_errors
    def predict(self, X: Any) -> np.ndarray:
        """Predict the classes (N,) of vectors or images `X`; raise `UserError` for images of another kind."""
        scores = self._compute_scores(X)
        return self.classes_[scores.argmax(axis=1)]

    @python_errors
    def predict_proba(self, X: Any) -> np.ndarray:
        """Estimate the probability (N, K) of each class of `classes_` for vectors or images `X`.

        For the ridge head on vectors these are its outputs, as least squares estimate probabilities; negative ones are set
        to 0 and the rest is scaled to the sum 1. Otherwise they are the softmax of the logits.
        """
        # Logits (N, K) of a linear model on vectors; a model on images returns probabilities already.
        scores = self._compute_scores(X)
        if not isinstance(self.model_, LinearModel):
            return scores
        if self.method_ == "ridge-head":
            # The outputs add up to 1, so that at least one is positive and the largest one remains the largest.
            positive = scores.clip(min=0)
        else:
            # The largest logit is subtracted so that `exp` does not overflow.
            positive = np.exp(scores - scores.max(axis=1, keepdims=True))
        return positive / positive.sum(axis=1, keepdims=True)

    def _fit_vectors(self, X: np.ndarray, labels: np.ndarray, split: Split, seed: int) -> None:
        """Train a linear classifier of vectors (N, D) with labels (N,), -1 for an unlabeled row."""
        method = self.method
        if method == RECOMMENDED:
            method = "ridge-head" if split.labeled.all() else "mixture-head"
        training = vectors.build_training(method, self.options or {}, self.rounds)
        self.model_ = vectors.train(training, X, labels, split, seed)
        self.method_ = method

    def _fit_images(self, X: Any, labels: np.ndarray, clients: np.ndarray, seed: int) -> None:
        """Train on N images by `halfmoon.run`, in a temporary folder, and keep the model.

        Args:
            X: the images.
            labels: class numbers (N,), -1 for an unlabeled image.
            clients: numbers of the clients (N,).
            seed: the seed of the run.
        """
        options = dict(self.options or {})
        # These follow from the arguments of the estimator and of `fit`.
        for name in ("data", "test", "clients", "seed", "run_dir", "rounds", "method", "baselines"):
            if name in options:
                raise UserError(f"options has {name!r}, which FederatedClassifier sets itself: leave it out.")
        options["method"] = self.method
        # Without unlabeled images there is nothing that a semi-supervised method could gain.
        if self.method == RECOMMENDED and (labels != UNKNOWN).all():
            options["method"] = "fedavg"
        if self.rounds is not None:
            options["rounds"] = self.rounds
        # A run is tested. An image of each class is enough here, as no accuracy of this test is used; without these,
        # labeled images would be held out of training.
        rows = [int(np.flatnonzero(labels == number)[0]) for number in range(int(labels.max()) + 1)]
        test = [X[row] for row in rows], labels[rows]
        data = make_memory_data((X, labels), test, clients)
        with tempfile.TemporaryDirectory() as folder, memory.registered(data) as name:
            result = python_api.run(
                data=name,
                clients=int(clients.max()) + 1,
                seed=seed,
                run_dir=Path(folder) / "run",
                progress=False,
                **options,
            )
            self.model_ = result.model
            self.method_ = str(result.summaries[0]["method"])
        height, width, channels = self.model_.shape
        self.n_features_in_ = height * width * channels

    def _compute_scores(self, X: Any) -> np.ndarray:
        """Compute what classes are predicted from, (N, K): the logits of vectors, or the probabilities of images.

        Raises:
            UserError: `X` has vectors, and the classifier was trained on images.
        """
        check_is_fitted(self)
        if isinstance(self.model_, LinearModel):
            return self.model_.logits(cast(np.ndarray, validate_data(self, X, dtype=np.float64, reset=False)))
        if not _is_images(X):
            raise UserError(
                "X is no batch of images, but the classifier was trained on images: give (N, H, W) or more."
            )
        # With its channel, a batch of gray images is not taken for one image.
        return self.model_.predict_proba(X[..., None] if getattr(X, "ndim", 0) == 3 else X)

    def _number_clients(
        self, clients: Any, labels: np.ndarray, generator: np.random.RandomState
    ) -> tuple[np.ndarray, int]:
        """Return the client number of each row, int64 (N,), and the number of clients.

        Args:
            clients: the client of each row, numbers or names; None: rows are dealt at random. Labeled rows are dealt
                first and then the others, so that each client gets its share of both.
            labels: class numbers (N,), -1 for an unlabeled row.
            generator: the random numbers.
        """
        rows = len(labels)
        if clients is None:
            if isinstance(self.n_clients, bool) or not isinstance(self.n_clients, Integral) or self.n_clients < 1:
                raise UserError(f"n_clients is {self.n_clients!r}: it must be a whole number of at least 1.")
            count = int(self.n_clients)
            order = generator.permutation(rows)
            order = order[np.argsort(labels[order] == UNKNOWN, kind="stable")]  # labeled rows first
            numbers = np.empty(rows, np.int64)
            numbers[order] = np.arange(rows) % count
            return numbers, count
        names = column_or_1d(clients, input_name="clients")
        if len(names) != rows:
            raise UserError(f"clients names the clients of {len(names)} rows, but X has {rows}; give one for each row.")
        if pd.isna(names).any():
            raise UserError("clients has a row without a client; give every row one, or leave the row out.")
        numbers, values = pd.factorize(names)
        return numbers.astype(np.int64), len(values)


def _is_images(X: Any) -> bool:
    """Check whether X is a batch of images: an array or tensor of three axes or more, or a list of images."""
    if isinstance(X, list | tuple) and len(X):
        return isinstance(X[0], Image.Image) or getattr(X[0], "ndim", 0) >= 2
    return getattr(X, "ndim", 0) >= 3


def _number_classes(y: Any, rows: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Convert the target y of an estimator to sorted classes and their numbers.

    Args:
        y: classes (N,), with marks of unlabeled rows: -1, and among strings also "-1", "", None and NaN.
        rows: N.
        name: the estimator's name, for errors.

    Returns:
        The classes, sorted, (K,), and their numbers, int64 (N,), -1 for an unlabeled row.

    Raises:
        ValueError: y is missing, has another length, or has values that are no classes. The messages are scikit-learn's.
    """
    if y is None:
        raise ValueError(f"This {name} estimator requires y to be passed, but the target y is None.")
    if isinstance(y, list | tuple) and any(isinstance(value, str) for value in y):
        y = np.array(y, dtype=object)  # without the type NumPy would write NaN as the string "nan"
    if np.ma.is_masked(y):  # masked values are unlabeled rows
        masked = np.ma.asarray(y)
        are_numbers = masked.dtype.kind in "if"
        y = masked.data.astype(masked.dtype if are_numbers else object)
        y[np.ma.getmask(masked)] = UNKNOWN if are_numbers else None
    values = column_or_1d(y, warn=True)
    check_consistent_length(np.empty((rows, 0)), values)
    if values.dtype.kind in "US":
        values = values.astype(object)
    if values.dtype == object:
        labeled = ~(pd.isna(values) | np.isin(values.astype(str), ("-1", "")))
    else:
        assert_all_finite(values, input_name="y")
        labeled = values != UNKNOWN
    if not labeled.any():
        raise UserError("y has no labeled row: every value marks an unlabeled one; label a few rows of each class.")
    names = cast(np.ndarray, values[labeled])
    if names.dtype == object:
        are_strings = {isinstance(value, str) for value in names}
        if len(are_strings) == 2:
            raise UserError("y mixes strings and numbers as classes; write all classes in one way.")
        if are_strings == {False}:
            names = np.array(names.tolist())  # numbers as objects become an array of numbers
    check_classification_targets(names)
    classes, numbers = np.unique(names, return_inverse=True)
    labels = np.full(rows, UNKNOWN, np.int64)
    labels[labeled] = numbers
    return classes, labels
