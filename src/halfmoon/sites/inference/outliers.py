"""Find images that do not resemble the images that a model was made for.

An image is an outlier if its distance, in the model's features, to the nearest images of a reference folder is large.
The features of a person's images are not stored in any model file: the reference folder is needed each time.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import special

from halfmoon.core.errors import UserError
from halfmoon.data.partition.primitives import named_generator
from halfmoon.sites.inference.image_folder import list_images, read_batches
from halfmoon.sites.inference.load import InferenceModel

NEIGHBOR_RANK = 5
"""The distance to this neighbor counts; 1 is the nearest."""

MAX_REFERENCE_IMAGES = 1000
MIN_REFERENCE_IMAGES = 40

EXPECTED_OUTLIER_SHARE = 0.05
"""Share of the reference folder's images that are beyond the limit themselves."""

FALSE_ALARM_PROBABILITY = 0.001
"""Probability of a warning about images that do come from the reference folder."""


@dataclass(frozen=True, eq=False)
class ReferenceImages:
    """The images to compare with.

    Attributes:
        features: features of unit length, (n, F).
        limit: the squared distance beyond which an image is an outlier.
    """

    features: np.ndarray
    limit: float

    def find_outliers(self, features: np.ndarray) -> np.ndarray:
        """Find the images, by features (N, F), that are beyond the limit, bool (N,)."""
        return _squared_distances(_normalize(features), self.features, NEIGHBOR_RANK) > self.limit


def build_reference(model: InferenceModel, folder: Path) -> ReferenceImages:
    """Compute the features of images that a model was made for, and the distance beyond which other images are outliers.

    The distance of an image is that to its `NEIGHBOR_RANK`-th nearest reference image, in the model's features. At most
    `MAX_REFERENCE_IMAGES` images of the folder are used, drawn at random with a fixed seed. The limit is chosen so that
    a share of `EXPECTED_OUTLIER_SHARE` of new images of the same kind exceeds it (as in conformal prediction).

    Args:
        model: computes the features.
        folder: images of the kind that the model was made for.

    Raises:
        UserError: fewer than `MIN_REFERENCE_IMAGES` images can be read.
    """
    all_paths = list_images(folder)
    permutation = named_generator(0, "known images").permutation(len(all_paths))
    sampled_rows = np.sort(permutation[:MAX_REFERENCE_IMAGES])
    paths = [all_paths[row] for row in sampled_rows]
    batch_features: list[np.ndarray] = []
    for batch in read_batches(model, folder, paths):
        if batch.rows:  # images that can be read
            _, features = model.represent(batch.images)
            batch_features.append(features)
    count = sum(map(len, batch_features))
    if count < MIN_REFERENCE_IMAGES:
        raise UserError(
            f"{folder} has {count} images that can be read: finding images that do not resemble them needs "
            f"{MIN_REFERENCE_IMAGES}."
        )
    features = _normalize(np.concatenate(batch_features))
    # The nearest neighbor of a reference image is the image itself, so the rank is one higher than for other images.
    distances = np.sort(_squared_distances(points=features, references=features, rank=NEIGHBOR_RANK + 1))
    # The conformal quantile: a new image exceeds the r-th smallest of n distances with probability 1 - r / (n + 1).
    limit_rank = min(count, int(np.ceil((count + 1) * (1 - EXPECTED_OUTLIER_SHARE))))
    return ReferenceImages(features, limit=float(distances[limit_rank - 1]))


def too_many_outliers(outliers: int, images: int) -> bool:
    """Check whether this number of outliers is implausible for images of the reference folder (binomial tail)."""
    return outliers > 0 and float(special.bdtrc(outliers - 1, images, EXPECTED_OUTLIER_SHARE)) < FALSE_ALARM_PROBABILITY


def _normalize(features: np.ndarray) -> np.ndarray:
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


def _squared_distances(points: np.ndarray, references: np.ndarray, rank: int) -> np.ndarray:
    """Compute the squared distance of each point (N, F) to its neighbor of this rank, (N,); all have unit length."""
    # |a - b|^2 = 2 - 2 a.b for vectors of unit length, so the nearest neighbors have the largest products.
    return 2 - 2 * np.sort(points @ references.T, axis=1)[:, -rank]
