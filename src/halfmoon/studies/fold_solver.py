"""Solve heads on many folds of the same images, each in milliseconds.

Every head is a combination of the leading principal directions of all images and of the labeled images (the solution of
a ridge regression is in the span of its data). The features of all images are projected onto an orthonormal basis of
this span once, and every fold is then solved with small matrices, by the methods themselves.

Two quantities are those of all images instead of a fold's training images, and neither depends on a label: the mean
that features are centered by, and the span in which the principal directions of a fold are computed.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.types import ClientData, ClientUpdate, Federation, Method, Task
from halfmoon.api.uploads import Upload
from halfmoon.core import rng
from halfmoon.core.tree import Tree
from halfmoon.engine.evaluation import Examples
from halfmoon.methods.analytic import MixtureHead, SumsUpdate, principal_directions
from halfmoon.models.vectors import LinearClassifier, Standardize
from halfmoon.studies.folds import Fold


class FoldSolver:
    """Projected features of a set of images, on which heads are solved for any choice of labeled images.

    Attributes:
        labels: int64 (N,), negative for an image that is never labeled.
        vectors: the centered features in the basis, float64 (N, 1, 1, r).
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
        self.vectors = (features @ self._basis)[:, None, None]
        width = self._basis.shape[1]
        # The vectors are centered already: the task's normalization must not change them.
        identity = Standardize(
            center=torch.zeros(width, dtype=features.dtype), scale=torch.ones(width, dtype=features.dtype)
        )
        network = LinearClassifier(classes=task.network.classes, norm="none", features=width, centered=True)
        self.task = replace(task, network=network, normalize=identity)

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
        updates = cast(Mapping[str, SumsUpdate], method.client_updates(self.task))
        server = method.start(self.task, self.task.network.init(rng.generator(0, "head")))
        federation = cast(Federation, _CenteredFederation(updates, self._select_rows(fold)))
        for number in range(self.task.rounds):
            server = method.round(replace(self.task, round=number), server, federation)
        vectors = self.vectors[:, 0, 0]  # centered and projected features of all images, (N, r)
        if images is not None:
            vectors = self._update.unit(self._server, images) @ self._basis
        logits = vectors @ server["head"]["weight"].T + server["head"]["bias"]
        return cast(np.ndarray, logits.argmax(1).numpy())

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


class _CenteredFederation:
    """A federation of one client, whose vectors are centered already: the mean that it reports is zero."""

    clients = 1
    size = 1
    labeled = 0

    def __init__(self, updates: Mapping[str, ClientUpdate], data: ClientData) -> None:
        self.updates = updates
        self.data = data
        self.cohort = torch.zeros(1, dtype=torch.int64)
        self.responders = self.cohort

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        """Compute the sums of the only client: they are the average."""
        sums = self.updates[client_update].begin(broadcast, {}, self.data)
        if client_update == "mean":
            sums = {**sums, "q": torch.zeros_like(sums["q"])}
        return Upload({"sums": sums}, torch.ones(1))
