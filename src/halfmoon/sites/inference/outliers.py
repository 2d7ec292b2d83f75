"""Whether images look unlike those that a model knows: their distance, in its features, to images of a folder.

The features of a person's images stay where they are: no model file has them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import special

from halfmoon.core.errors import UserError
from halfmoon.data.partition.primitives import stream
from halfmoon.sites.inference.image_folder import list_images, read_batches
from halfmoon.sites.inference.load import InferenceModel

NEIGHBOR_RANK, MAX_REFERENCE_IMAGES, MIN_REFERENCE_IMAGES = 5, 1000, 40
"""The neighbor that counts, and how many images of the folder are looked at, at most and at least."""

EXPECTED_OUTLIER_SHARE, FALSE_ALARM_PROBABILITY = 0.05, 0.001
"""The share of a folder's own images that look unlike it, and the chance that a warning of many is a false alarm."""


@dataclass(frozen=True, eq=False)
class ReferenceImages:
    """Images that a model knows: features (n, F) of length one, and the distance beyond which others look unlike."""

    features: np.ndarray
    limit: float

    def find_outliers(self, features: np.ndarray) -> np.ndarray:
        """Return which features (N, F) are further from their `NEAREST` neighbor than the limit, bool (N,)."""
        return _distances(_unit(features), self.features, NEIGHBOR_RANK) > self.limit


def build_reference(model: InferenceModel, folder: Path) -> ReferenceImages:
    """Return the images of a folder, at most `MOST` of them; raise UserError where there are too few.

    Each one's distance to the others gives the limit, which a share of `RATE` of them exceeds.
    """
    paths = list_images(folder)
    paths = [paths[n] for n in np.sort(stream(0, "known images").permutation(len(paths))[:MAX_REFERENCE_IMAGES])]
    parts = [model.represent(batch.images)[1] for batch in read_batches(model, folder, paths) if len(batch.rows)]
    count = sum(map(len, parts))
    if count < MIN_REFERENCE_IMAGES:
        raise UserError(
            f"{folder} has {count} images that can be read: to know what is unlike them takes {MIN_REFERENCE_IMAGES}."
        )
    features = _unit(np.concatenate(parts))
    own = np.sort(_distances(features, features, NEIGHBOR_RANK + 1))  # the nearest is the image itself
    return ReferenceImages(
        features, float(own[min(count, int(np.ceil((count + 1) * (1 - EXPECTED_OUTLIER_SHARE)))) - 1])
    )


def too_many_outliers(unlike: int, images: int) -> bool:
    """Return whether so many images look unlike that they are no draw of the folder's own, by the binomial tail."""
    return unlike > 0 and float(special.bdtrc(unlike - 1, images, EXPECTED_OUTLIER_SHARE)) < FALSE_ALARM_PROBABILITY


def _unit(features: np.ndarray) -> np.ndarray:
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


def _distances(points: np.ndarray, others: np.ndarray, nearest: int) -> np.ndarray:
    """Return the squared distances (N,) of points (N, F) of length one to their nearest of others, by number from 1."""
    return 2 - 2 * np.sort(points @ others.T, axis=1)[:, -nearest]
