"""Solve heads on many folds, or many draws of the labels, of the same images, each in a fraction of a second.

Every head is a combination of the leading principal directions of all images and of the labeled images (the solution of
a ridge regression is in the span of its data). The features of all images are projected onto an orthonormal basis of
this span once, and every fold is then solved with small matrices, by the methods themselves.

In `FoldSolver`, two quantities are those of all images instead of a fold's training images, and neither depends on a
label: the mean that features are centered by, and the span in which the principal directions of a fold are computed.
`DrawSolver` centers by the mean of a draw's training images, and its span is wider.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.types import ClientData, Federation, Method, Task
from halfmoon.core import rng
from halfmoon.core.tree import Tree
from halfmoon.engine.evaluation import Examples, ModelEvaluation
from halfmoon.methods.analytic import MixtureHead, SumsUpdate, eigen_decomposition, principal_directions
from halfmoon.models.vectors import LinearClassifier, Standardize
from halfmoon.studies.decision import SingleClientFederation, evaluate_rows, solve_heads
from halfmoon.studies.folds import Fold

FIRST_DIRECTIONS = 160
"""Leading principal directions of all images, from which those of a draw are found: more than a head uses."""

FIRST_STEPS = 3
"""Steps to find those of all images from random ones."""

MIN_SQUARE = 1e-12
"""Square of a component outside of a basis, as a share of the sum of squares, from which on it is no rounding error."""


class FoldSolver:
    """Projected features of a set of images, on which heads are solved for any choice of labeled images.

    Attributes:
        labels: int64 (N,), negative for an image that is never labeled.
        vectors: the centered features in the basis, float64 (N, r).
        task: the task on these vectors.
    """

    def __init__(self, task: Task, data: Examples) -> None:
        """Center the features of all images once, and project them on fewer dimensions, to solve heads on them quickly.

        Args:
            task: the task on features; its network is a head that subtracts a center from them.
            data: features of all images and their labels; those with a negative label are never labeled.
        """
        self.labels = data.labels.numpy()
        method = MixtureHead()
        # The mixture head is solved on q, the square roots of features, which vary less with the few largest ones. Its
        # client update of the first round can convert features: `roots` computes q, and `unit` centers q by the server's
        # mean and scales it to length 1. The same conversion serves for the heads of other methods.
        self._update = cast(SumsUpdate, method.client_updates(task)["mean"])
        # A head needs initial parameters, but the solution does not depend on them.
        server = method.start(task, task.network.init(rng.generator(0, "head")))
        mean = self._update.roots(server, data.images).mean(0)
        self._server = {**server, "head": {**server["head"], "center": mean}}
        features = self._update.unit(self._server, data.images)
        # As many principal directions as the mixture head uses; together with the labeled images they suffice for all heads.
        self._basis = _common_basis(features, features[data.labels >= 0], method.directions)
        self.vectors = features @ self._basis
        self.task = _make_vector_task(task, self._basis.shape[1])

    def predict(self, method: Method, fold: Fold, images: Tensor | None = None) -> np.ndarray:
        """Solve a head on the labeled and unlabeled rows of a fold, and predict images.

        The method runs as in a federation of one client, which has all rows of the fold and uploads its sums in every
        round. So the head is the one that the method itself trains.

        Args:
            method: a method whose client updates are sums (`halfmoon.methods.analytic`).
            fold: the rows; its test rows take no part.
            images: features of the images to predict, (n, 1, 1, F); None for all images of the solver.

        Returns:
            The predicted class of each image, int64 (n,).
        """
        head = _solve(method, self.task, _CenteredFederation(self._select_rows(fold)))
        vectors = self.vectors
        if images is not None:
            vectors = self._update.unit(self._server, images) @ self._basis
        return cast(np.ndarray, _compute_logits(head, vectors).argmax(1).numpy())

    def _select_rows(self, fold: Fold) -> ClientData:
        """Select the training rows of a fold as the data of one client: labeled x with classes y, and unlabeled u."""
        labeled = torch.from_numpy(fold.labeled)
        unlabeled = torch.from_numpy(fold.unlabeled)
        return ClientData(
            x=self.vectors[labeled],
            y=torch.from_numpy(self.labels[fold.labeled]),
            u=self.vectors[unlabeled],
            labeled=torch.tensor(len(labeled)),
            unlabeled=torch.tensor(len(unlabeled)),
        )


class DrawSolver:
    """Features of a set of images, on which heads are solved for many draws of the labels.

    The heads are those of `solve_heads`, in an eighth of the time. Only the principal directions of a draw are
    approximate: they are found from those of all images, by one step of a block Krylov method. On 3,000 photographs of
    ten classes no prediction changes.
    """

    def __init__(self, task: Task, data: Examples) -> None:
        """Convert the features of all images, and compute their leading principal directions.

        Args:
            task: the task on features; its network is a head that subtracts a center from them.
            data: features of all images, and their labels.
        """
        self._data = data
        self._task = task
        method = MixtureHead()
        server = method.start(task, task.network.init(rng.generator(0, "head")))
        self._update = cast(SumsUpdate, method.client_updates(task)["mean"])
        self._roots = self._update.roots(server, data.images)
        # Of fewer images or features `solve_heads` is as fast.
        self._is_small = min(self._roots.shape) < 4 * FIRST_DIRECTIONS
        if not self._is_small:
            vectors = self._update.center(self._roots, self._roots.mean(0)).float()
            start = torch.randn(vectors.shape[1], FIRST_DIRECTIONS, generator=rng.generator(0, "directions"))
            self._first_basis = _orthonormalize(start.double())
            for _ in range(FIRST_STEPS):
                self._first_basis = improve_directions(vectors, self._first_basis, FIRST_DIRECTIONS)

    def evaluate(self, methods: Sequence[Method], fold: Fold) -> list[ModelEvaluation]:
        """Solve heads on the labeled and unlabeled rows of a draw, and evaluate them on its test rows.

        Args:
            methods: methods whose client updates are sums (`halfmoon.methods.analytic`).
            fold: the rows.

        Returns:
            The evaluation of each method.
        """
        directions = max((method.directions for method in methods if isinstance(method, MixtureHead)), default=1)
        has_many_labels = 2 * len(fold.labeled) > self._roots.shape[1]  # the span of so many leaves little to save
        if self._is_small or has_many_labels or directions > FIRST_DIRECTIONS:
            models = solve_heads(methods, self._task, self._data, fold)
            return [evaluate_rows(self._task, model, self._data, fold.test) for model in models]
        labeled_count = len(fold.labeled)
        train_rows = torch.from_numpy(np.concatenate([fold.labeled, fold.unlabeled]))
        test_rows = torch.from_numpy(fold.test)
        train = self._roots[train_rows]
        center = train.mean(0)
        train = self._update.center(train, center)
        tests = self._update.center(self._roots[test_rows], center)
        # Both heads are combinations of the principal directions and of the labeled images.
        basis = improve_directions(train.float(), self._first_basis, directions)
        basis = torch.cat([basis, _span_outside(basis, train[:labeled_count])], 1)
        vectors = train @ basis
        data = ClientData(
            x=vectors[:labeled_count],
            y=self._data.labels[train_rows[:labeled_count]],
            u=vectors[labeled_count:],
            labeled=torch.tensor(labeled_count),
            unlabeled=torch.tensor(len(fold.unlabeled)),
        )
        federation = _CenteredFederation(data)
        task = _make_vector_task(self._task, basis.shape[1])
        test_vectors = tests @ basis
        test_labels = self._data.labels[test_rows]
        return [_evaluate_head(_solve(method, task, federation), test_vectors, test_labels) for method in methods]


def improve_directions(vectors: Tensor, basis: Tensor, count: int) -> Tensor:
    """Improve an estimate of the leading principal directions of vectors, by one step of a block Krylov method.

    The basis and its products with the matrix of second moments span a subspace, in which the eigenvectors of the second
    moments are those of a small matrix (Musco and Musco, NeurIPS 2015).

    Args:
        vectors: (n, F), float32: products in float64 take twice as long, and an error of 1e-6 of a direction has no effect.
        basis: the estimate, orthonormal columns (F, k), float64.
        count: the number of directions to return, at most 2 k.

    Returns:
        Orthonormal columns (F, count), float64.
    """
    following = (vectors.T @ (vectors @ basis.float())).double()
    # Twice, because rounding errors of the first subtraction are not small beside what remains.
    for _ in range(2):
        following = following - basis @ (basis.T @ following)
    subspace = torch.cat([basis, _orthonormalize(following)], 1)
    projected = vectors @ subspace.float()
    return subspace @ principal_directions((projected.T @ projected).double(), count)


def _span_outside(basis: Tensor, vectors: Tensor) -> Tensor:
    """Compute orthonormal columns (F, k) that span, together with those of a basis, all vectors (n, F); k is at most n."""
    outside = vectors - vectors @ basis @ basis.T
    # Not by a QR decomposition, whose columns are arbitrary where vectors are equal or in the span of the basis.
    values, weights = eigen_decomposition(outside @ outside.T)
    is_outside = values > MIN_SQUARE * vectors.square().sum()
    columns = outside.T @ (weights[:, is_outside] / values[is_outside].sqrt())
    return columns - basis @ (basis.T @ columns)


def _orthonormalize(columns: Tensor) -> Tensor:
    """Compute orthonormal columns (F, n) whose span includes `columns` (F, n)."""
    return cast(Tensor, torch.linalg.qr(columns)[0])  # pyright: ignore[reportUnknownMemberType]


def _make_vector_task(task: Task, width: int) -> Task:
    """Make the task on centered vectors of `width` coordinates: neither its network nor its normalization changes them."""
    identity = Standardize(center=torch.zeros(width, dtype=torch.float64), scale=torch.ones(width, dtype=torch.float64))
    network = LinearClassifier(classes=task.network.classes, norm="none", features=width, centered=True)
    return replace(task, network=network, normalize=identity)


def _solve(method: Method, task: Task, federation: "_CenteredFederation") -> Tree:
    """Run all rounds of a method in a federation of one client, and return its head, "weight" (K, r) and "bias" (K,)."""
    updates = cast(Mapping[str, SumsUpdate], method.client_updates(task))
    # The vectors are converted already: without this flag, each round would copy them several times.
    federation.updates = {name: replace(update, precomputed=True) for name, update in updates.items()}
    server = method.start(task, task.network.init(rng.generator(0, "head")))
    for number in range(task.rounds):
        server = method.round(replace(task, round=number), server, cast(Federation, federation))
    return server["head"]


def _compute_logits(head: Tree, vectors: Tensor) -> Tensor:
    """Compute the logits (n, K) of centered vectors (n, r)."""
    return vectors @ head["weight"].T + head["bias"]


def _evaluate_head(head: Tree, vectors: Tensor, labels: Tensor) -> ModelEvaluation:
    """Evaluate a head on centered vectors (n, r) with labels (n,)."""
    logits = _compute_logits(head, vectors)
    predicted = logits.argmax(1)
    classes = len(head["bias"])
    confusion = torch.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)
    return ModelEvaluation(confusion, float(F.cross_entropy(logits, labels)), (predicted == labels).numpy())


def _common_basis(features: Tensor, labeled: Tensor, directions: int) -> Tensor:
    """Compute an orthonormal basis (F, r) of the span of a number of principal directions and of all labeled images.

    Args:
        features: centered features of all images, (N, F).
        labeled: those of the labeled images, (n, F).
        directions: the number of leading principal directions of `features`.

    Returns:
        The basis vectors as columns, `directions` + n of them; the identity where this is F or more.
    """
    width = features.shape[1]
    if directions + len(labeled) >= width:
        return torch.eye(width, dtype=features.dtype)
    if len(features) < width:
        # Fewer images than dimensions: the eigenvectors of the small matrix of inner products are the weights with which
        # the images add up to the principal directions. The QR decomposition below normalizes these.
        weights = principal_directions(features @ features.T, min(directions, len(features)))
        leading = features.T @ weights
    else:
        leading = principal_directions(features.T @ features, directions)
    # Arbitrary further columns, so that a head finds as many directions as it requests where images are few.
    missing = torch.eye(width, directions - leading.shape[1], dtype=features.dtype)
    columns = torch.cat([leading, labeled.T, missing], 1)
    return cast(Tensor, torch.linalg.qr(columns)[0])  # pyright: ignore[reportUnknownMemberType]


class _CenteredFederation(SingleClientFederation):
    """A federation of one client, whose vectors are centered already: the mean that it reports is zero."""

    def compute_sums(self, client_update: str, broadcast: Tree) -> Tree:
        sums = self.updates[client_update].begin(broadcast, {}, self.data)
        return {**sums, "q": torch.zeros_like(sums["q"])} if client_update == "mean" else sums
