"""A scikit-learn classifier that is trained by a simulated federation."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any, cast

import numpy as np
import pandas as pd

from halfmoon.core.errors import UserError, install_command
from halfmoon.data.images import UNKNOWN
from halfmoon.data.partition.split import Split
from halfmoon.notebook.progress import python_errors
from halfmoon.runs import vectors

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
    """A classifier of vectors, trained by clients that send no row to the server.

    The clients are simulated in this process. What each of them sends is what it would send in a federation: sums over
    its rows, or a trained model.

    Rows without a label are marked in y: -1 in numbers, as in `sklearn.semi_supervised`; -1, "-1", "", None or NaN among
    strings.

    Attributes:
        method: ridge-head (labels only) and mixture-head (semi-supervised) solve a linear classifier from sums, so that the
            distribution of rows over clients does not change it. fedavg trains one by steps (labels only). recommended:
            mixture-head if there are unlabeled rows, else ridge-head.
        n_clients: number of clients to which rows are dealt at random; without effect if `fit` is called with clients.
        rounds: number of rounds of a method that trains by steps; None: 50.
        options: further options: those of the method (strength, even_labels, directions, shrinkage, em_rounds, prox) and,
            of one that trains by steps, lr, labeled_batch and epochs.
        random_state: seed of the clients' rows and batches, as in scikit-learn.
        classes_: the classes, sorted, (K,).
        n_features_in_: number of features.
        method_: name of the method that was trained.
        n_clients_: number of clients.
        model_: the trained model.
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
        """Store `method`, `n_clients`, `rounds`, `options` and `random_state`; `fit` checks them."""
        self.method = method
        self.n_clients = n_clients
        self.rounds = rounds
        self.options = options
        self.random_state = random_state

    @python_errors
    def fit(self, X: Any, y: Any, clients: Any = None) -> "FederatedClassifier":
        """Train on labeled and unlabeled rows.

        Args:
            X: vectors (N, D).
            y: classes (N,), with a mark for an unlabeled row, see the class.
            clients: the client of each row, (N,), numbers or names; None: rows are dealt to `n_clients` clients of equal
                size at random.

        Raises:
            UserError: the method cannot run on vectors, an option is wrong, or no row is labeled.
        """
        X = cast(np.ndarray, validate_data(self, X, dtype=np.float64))
        classes, labels = _number_classes(y, len(X), type(self).__name__)
        generator = check_random_state(self.random_state)
        numbers, count = self._number_clients(clients, len(X), generator)
        labeled = labels != UNKNOWN
        method = self.method
        if method == RECOMMENDED:
            method = "ridge-head" if labeled.all() else "mixture-head"
        training = vectors.build_training(method, self.options or {}, self.rounds)
        split = Split(client=numbers, labeled=labeled, clients=count)
        self.model_ = vectors.train(training, X, labels, split, seed=int(generator.randint(2**31 - 1)))
        self._gives_probabilities = method == "ridge-head"
        self.classes_ = classes
        self.method_ = method
        self.n_clients_ = count
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Predict the classes (N,) of vectors `X` (N, D)."""
        logits = self._logits(X)
        return self.classes_[logits.argmax(axis=1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Estimate the probability (N, K) of each class of `classes_` for vectors `X` (N, D).

        For the ridge head these are its outputs, as least squares estimate probabilities; negative ones are set to 0 and
        the rest is scaled to the sum 1. For other methods they are the softmax of the logits.
        """
        logits = self._logits(X)
        if self._gives_probabilities:
            # The outputs add up to 1, so that at least one is positive and the largest one stays the largest.
            positive = logits.clip(min=0)
        else:
            positive = np.exp(logits - logits.max(axis=1, keepdims=True))
        return positive / positive.sum(axis=1, keepdims=True)

    def _logits(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return self.model_.logits(cast(np.ndarray, validate_data(self, X, dtype=np.float64, reset=False)))

    def _number_clients(self, clients: Any, rows: int, generator: np.random.RandomState) -> tuple[np.ndarray, int]:
        """Return the client number of each row, int64 (N,), and the number of clients."""
        if clients is None:
            if isinstance(self.n_clients, bool) or not isinstance(self.n_clients, Integral) or self.n_clients < 1:
                raise UserError(f"n_clients is {self.n_clients!r}: it must be a whole number of at least 1.")
            count = int(self.n_clients)
            return generator.permutation(rows).astype(np.int64) % count, count
        names = column_or_1d(clients, input_name="clients")
        if len(names) != rows:
            raise UserError(f"clients names the clients of {len(names)} rows, but X has {rows}; give one for each row.")
        if pd.isna(names).any():
            raise UserError("clients has a row without a client; give every row one, or leave the row out.")
        numbers, values = pd.factorize(names)
        return numbers.astype(np.int64), len(values)


def _number_classes(y: Any, rows: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Number the classes of y.

    Args:
        y: classes (N,), with marks of unlabeled rows.
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
            names = np.array(names.tolist())
    check_classification_targets(names)
    classes, numbers = np.unique(names, return_inverse=True)
    labels = np.full(rows, UNKNOWN, np.int64)
    labels[labeled] = numbers
    return classes, labels
