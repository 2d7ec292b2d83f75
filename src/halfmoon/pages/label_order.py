"""Order of the images to label: uncertain predictions first, spread over predicted classes and over feature space.

A good batch of labels covers the data (Sener and Savarese, ICLR 2018) and contains uncertain images (Ash et al., BADGE,
ICLR 2020). Here the predicted classes take turns, the class with the fewest labels first. Each turn picks the image
with the largest product of margin uncertainty and squared distance to all labeled or picked images.
"""

from dataclasses import dataclass

import numpy as np

RANDOM_INTERVAL = 5
"""One of so many images in the order is a random one."""

GREEDY_IMAGES = 600
"""Number of images that are picked one by one; all others follow by uncertainty."""

MIN_UNCERTAINTY = 0.05
"""Added to each uncertainty, because a model may be certain and wrong."""

RANDOM_LABELED_SHARE = 0.9
"""Share of the beginning of the random order that must be labeled, so that its labels are a random sample."""

DISTANCE_BATCH_IMAGES = 256
"""Number of labeled images whose distances to all images are in memory at once."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """A model's predictions for N images.

    Attributes:
        probabilities: float64 (N, classes); NaN in the rows of unreadable images.
        features: float32 (N, F), the input of the model's head.
        classes: names of the model's classes.
    """

    probabilities: np.ndarray
    features: np.ndarray
    classes: tuple[str, ...] = ()

    @property
    def mask(self) -> np.ndarray:
        """Mask of the images that have a prediction, bool (N,)."""
        return np.asarray(np.isfinite(self.probabilities).all(1))

    @property
    def uncertainty(self) -> np.ndarray:
        """Margin uncertainty (N,): 1 - (largest - second largest probability), from 0 to 1; NaN without prediction."""
        if self.probabilities.shape[1] == 1:
            return np.where(self.mask, 0.0, np.nan)
        top = np.sort(self.probabilities, 1)[:, -2:]
        return 1 - (top[:, 1] - top[:, 0])

    @property
    def predicted(self) -> np.ndarray:
        """Index of the most probable class, int64 (N,); -1 without prediction."""
        return np.where(self.mask, np.nan_to_num(self.probabilities).argmax(1), -1)


def shuffle_rows(mask: np.ndarray, seed: int = 0) -> np.ndarray:
    """Shuffle the rows where `mask`, bool (N,), is true.

    The order of two rows depends only on N and the seed. A new label removes its image and moves no other one.
    """
    order = np.random.default_rng(seed).permutation(len(mask))
    return order[mask[order]]


def mix_in_random(order: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Replace every fifth image of the order to label (`RANDOM_INTERVAL`) by the next one of a random order.

    The accuracy of a model is estimated on the random images, because images that were picked are harder than others.

    Args:
        order: rows of the images, int64 (n,).
        random: the same rows in a random order.

    Returns:
        The same rows, int64 (n,), each once.
    """
    ordered_rows = iter(order.tolist())
    random_rows = iter(random.tolist())
    rows = dict[int, None]()  # a set with the order of insertion
    for position in range(1, len(order) + 1):
        source = random_rows if position % RANDOM_INTERVAL == 0 else ordered_rows
        rows[next(row for row in source if row not in rows)] = None
    return np.array(list(rows), np.int64)


def find_randomly_labeled(labels: np.ndarray, undecided: np.ndarray, seed: int = 0) -> np.ndarray:
    """Find the labeled images that are a random sample, on which accuracy can be estimated without bias.

    The sample is the longest beginning of the random order in which nine of ten images are labeled or undecided.

    Args:
        labels: int64 (N,), -1 for none.
        undecided: bool (N,), images that a person could not label.
        seed: the seed of the random order in which images were shown.

    Returns:
        Mask of the labeled rows in the sample, bool (N,).
    """
    order = shuffle_rows(np.ones(len(labels), bool), seed)
    # For each beginning of the order the share of images that a person has seen.
    share = np.cumsum((labels >= 0)[order] | undecided[order]) / np.arange(1, len(order) + 1)
    ends = np.flatnonzero(share >= RANDOM_LABELED_SHARE)
    count = ends[-1] + 1 if len(ends) else 0
    mask = np.zeros(len(labels), bool)
    mask[order[:count]] = True
    return mask & (labels >= 0)


def rank_descending(uncertainty: np.ndarray) -> np.ndarray:
    """Rank uncertainties (N,) as int64 (N,): 1 for the largest, 0 for NaN."""
    order = np.argsort(-uncertainty, kind="stable")  # sorts NaN to the end
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(1, len(order) + 1)
    return np.where(np.isfinite(uncertainty), ranks, 0)


def order_for_labeling(
    predictions: Predictions,
    labels: np.ndarray,
    unlabeled: np.ndarray,
    seed: int = 0,
    greedy_images: int = GREEDY_IMAGES,
) -> np.ndarray:
    """Order the images to label, the most useful first: uncertain ones, spread over classes and features.

    Args:
        predictions: predictions for N images.
        labels: int64 (N,), the labels so far as indices of the model's classes, -1 for none.
        unlabeled: bool (N,), the images to order.
        seed: the seed by which ties are broken.
        greedy_images: number of images that are picked one by one; all others follow by uncertainty.

    Returns:
        The rows where `unlabeled` is true, each once. Those without a prediction are last.
    """
    mask = predictions.mask
    rows = shuffle_rows(unlabeled & mask, seed)  # break ties by chance, not by file name
    unpredicted = shuffle_rows(unlabeled & ~mask, seed)
    uncertainty = predictions.uncertainty[rows]
    # Positions in `rows`. Picking one by one takes a pass over all images for each pick, so their number is limited.
    picked = _pick_greedily(predictions, labels, rows, min(greedy_images, len(rows)))
    rest = np.setdiff1d(np.arange(len(rows)), picked, assume_unique=True)
    rest = rest[np.argsort(-uncertainty[rest], kind="stable")]
    return np.concatenate([rows[picked], rows[rest], unpredicted])


def distance_to_labeled(predictions: Predictions, labels: np.ndarray) -> np.ndarray:
    """Compute the distance of each image to the nearest labeled image, in standardized features.

    The square of this distance is the factor by which `order_for_labeling` multiplies the uncertainty for its first
    pick.

    Args:
        predictions: predictions for N images.
        labels: int64 (N,), -1 for none.

    Returns:
        Distances (N,); NaN without prediction or without any label.
    """
    points = standardize(predictions.features, predictions.mask)
    labeled = np.flatnonzero((labels >= 0) & predictions.mask)
    squares = (points**2).sum(1)
    nearest = np.full(len(points), np.nan)
    for first in range(0, len(labeled), DISTANCE_BATCH_IMAGES):
        batch = labeled[first : first + DISTANCE_BATCH_IMAGES]
        # |a - b|^2 = |a|^2 + |b|^2 - 2 ab, as one matrix product
        distances = squares[:, None] + squares[batch] - 2 * points @ points[batch].T
        nearest = np.fmin(nearest, distances.min(1))
    # Rounding makes some squares slightly negative.
    return np.where(predictions.mask, np.sqrt(np.maximum(nearest, 0)), np.nan)


def sort_by_similarity(predictions: Predictions, row: int) -> np.ndarray:
    """Sort all rows by the distance of their features to those of one row; rows without prediction are last."""
    distances = _squared_distances(predictions.features, predictions.features[row])
    return np.argsort(np.where(predictions.mask, distances, np.inf), kind="stable")


def _pick_greedily(predictions: Predictions, labels: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """Pick the images to label next, one by one, so that classes are balanced and similar images are not repeated.

    Each pick is of the predicted class with the fewest labels and picks so far, and has the largest product of
    uncertainty and squared distance to all labeled or picked images in the space of features.

    Args:
        predictions: predictions and features of all images.
        labels: int64 (N,), -1 for none.
        rows: the images to choose from, all with a prediction.
        count: the number of picks, at most that of `rows`.

    Returns:
        Positions in `rows` in the order of the picks, int64 (count,).
    """
    # `mask` selects the images with a prediction.
    all_points = standardize(predictions.features, predictions.mask)
    points = all_points[rows]
    predicted = predictions.predicted[rows]
    weight = predictions.uncertainty[rows] + MIN_UNCERTAINTY
    labeled = np.flatnonzero((labels >= 0) & predictions.mask)
    nearest = np.full(len(rows), np.inf)  # squared distance to the nearest labeled or picked image
    for row in labeled:
        np.minimum(nearest, _squared_distances(points, all_points[row]), out=nearest)
    if not len(labeled) and len(rows):
        # Without labels start with the image nearest to the mean, because an outlier is a poor first label.
        nearest = 1 / (1e-9 + _squared_distances(points, points.mean(0)))
    # Labels and picks of each class.
    counts = np.bincount(labels[labeled], minlength=predictions.probabilities.shape[1]).astype(float)
    available = np.ones(len(rows), bool)
    picked = np.empty(count, np.int64)
    for n in range(count):
        classes = np.unique(predicted[available])
        rarest_class = classes[counts[classes].argmin()]
        score = np.where(available & (predicted == rarest_class), weight * nearest, -1.0)
        position = int(score.argmax())
        picked[n] = position
        available[position] = False
        counts[predicted[position]] += 1
        distance = _squared_distances(points, points[position])
        # After a first pick without labels `nearest` is not a distance, but the closeness to the mean.
        nearest = distance if n == 0 and not len(labeled) else np.minimum(nearest, distance)
    return picked


def _squared_distances(points: np.ndarray, point: np.ndarray) -> np.ndarray:
    difference = points - point
    return np.einsum("nf,nf->n", difference, difference)


def standardize(features: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Scale each feature to mean 0 and standard deviation 1 over the rows in a mask.

    Args:
        features: (N, F).
        mask: bool (N,).

    Returns:
        float64 (N, F); 0 for constant features and for rows that are not in the mask.
    """
    rows = features[mask].astype(np.float64)
    if not len(rows):
        return np.zeros(features.shape)
    mean = rows.mean(0)
    deviation = rows.std(0)
    return np.where(mask[:, None], (features - mean) / np.where(deviation > 1e-12, deviation, 1.0), 0.0)
