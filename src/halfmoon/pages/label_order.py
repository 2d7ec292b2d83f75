"""Which images to label first: those that the model is unsure of, spread over its predictions and over what they show.

A good batch of labels covers the data (Sener and Savarese, ICLR 2018) and asks where the model wavers (Ash et al.,
BADGE, ICLR 2020). Here: one predicted class after the other, those with the fewest labels first, gives the image for
which margin-uncertainty times the squared distance to everything labeled or chosen is largest.
"""

from dataclasses import dataclass

import numpy as np

RANDOM_INTERVAL = 5  # one of so many images is a random one
GREEDY_IMAGES = 600  # so many images are chosen one by one; the rest follows by uncertainty


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model makes of N images: `probabilities` float64 (N, classes) and `features` float32 (N, F).

    A row of an image that could not be read is NaN. `classes` are the model's.
    """

    probabilities: np.ndarray
    features: np.ndarray
    classes: tuple[str, ...] = ()

    @property
    def mask(self) -> np.ndarray:
        """Return which images the model has seen, bool (N,)."""
        return np.asarray(np.isfinite(self.probabilities).all(1))

    @property
    def uncertainty(self) -> np.ndarray:
        """Return 1 - (largest probability - second largest), (N,): 0 for sure, 1 for a tie; NaN where unknown."""
        if self.probabilities.shape[1] == 1:
            return np.where(self.mask, 0.0, np.nan)
        top = np.sort(self.probabilities, 1)[:, -2:]
        return 1 - (top[:, 1] - top[:, 0])

    @property
    def predicted(self) -> np.ndarray:
        """Return the most probable class, int64 (N,); -1 where unknown."""
        return np.where(self.mask, np.nan_to_num(self.probabilities).argmax(1), -1)


def shuffle_rows(open_: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return the rows where `open_` bool (N,) is true, in an order that depends on N and the seed alone.

    So an answer takes its image out of the order and moves no other.
    """
    order = np.random.default_rng(seed).permutation(len(open_))
    return order[open_[order]]


def mix_in_random(order: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Return an order of rows in which every one of `EVERY` is the next of a random order of the same rows.

    What was drawn at random tells how good a model is; what was chosen is harder than the rest.
    """
    sources, rows = (iter(order.tolist()), iter(random.tolist())), dict[int, None]()  # rows in their order
    for place in range(1, len(order) + 1):
        rows[next(row for row in sources[place % RANDOM_INTERVAL == 0] if row not in rows)] = None
    return np.array(list(rows), np.int64)


def find_randomly_labeled(labels: np.ndarray, passed: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return which labeled rows, bool (N,), were shown because chance said so: nearly all of the first of its order.

    These are the rows of the longest beginning of the random order in which nine of ten have a label or were `passed`,
    bool (N,), as too hard to name.
    """
    order = shuffle_rows(np.ones(len(labels), bool), seed)
    share = np.cumsum((labels >= 0)[order] | passed[order]) / np.arange(1, len(order) + 1)
    enough = np.flatnonzero(share >= 0.9)
    mask = np.zeros(len(labels), bool)
    mask[order[: enough[-1] + 1 if len(enough) else 0]] = True
    return mask & (labels >= 0)


def rank_descending(uncertainty: np.ndarray) -> np.ndarray:
    """Return the rank of each uncertainty (N,), int64 (N,): 1 for the largest; 0 for NaN."""
    places = np.argsort(-uncertainty, kind="stable")  # NaN comes last
    ranks = np.empty(len(places), np.int64)
    ranks[places] = np.arange(1, len(places) + 1)
    return np.where(np.isfinite(uncertainty), ranks, 0)


def order_for_labeling(
    guesses: Predictions, labels: np.ndarray, open_: np.ndarray, seed: int = 0, spread: int = GREEDY_IMAGES
) -> np.ndarray:
    """Return the rows to label, the most useful first: every row where `open_` bool (N,) is true, once.

    `labels` int64 (N,) are those of the model's classes that are given already, -1 for none. Images that the model has
    not seen come last. `spread` images are chosen one by one.
    """
    mask = guesses.mask
    rows = shuffle_rows(open_ & mask, seed)  # ties are broken by chance, not by name
    blind = shuffle_rows(open_ & ~mask, seed)
    uncertainty = guesses.uncertainty[rows]
    places = _spread(guesses, labels, rows, min(spread, len(rows)))
    rest = np.setdiff1d(np.arange(len(rows)), places, assume_unique=True)
    rest = rest[np.argsort(-uncertainty[rest], kind="stable")]
    return np.concatenate([rows[places], rows[rest], blind])


def distance_to_labeled(guesses: Predictions, labels: np.ndarray) -> np.ndarray:
    """Return how far each image (N,) is, in features, from the nearest that has a label; NaN where nobody can tell.

    That is what `order` multiplies by the uncertainty, as it stands before the first image is chosen.
    """
    space, labeled = standardize(guesses.features, guesses.mask), np.flatnonzero((labels >= 0) & guesses.mask)
    squares, nearest = (space**2).sum(1), np.full(len(space), np.nan)
    for first in range(0, len(labeled), 256):
        some = labeled[first : first + 256]
        nearest = np.fmin(nearest, (squares[:, None] + squares[some] - 2 * space @ space[some].T).min(1))
    return np.where(guesses.mask, np.sqrt(np.maximum(nearest, 0)), np.nan)


def sort_by_similarity(guesses: Predictions, row: int) -> np.ndarray:
    """Return all rows by their distance, in features, from one of them; what the model has not seen comes last."""
    distances = _distances(guesses.features, guesses.features[row])
    return np.argsort(np.where(guesses.mask, distances, np.inf), kind="stable")


def _spread(guesses: Predictions, labels: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """Return places in `rows`, `count` of them, chosen greedily."""
    space = standardize(guesses.features, guesses.mask)
    points, predicted = space[rows], guesses.predicted[rows]
    weight = guesses.uncertainty[rows] + 0.05  # what the model is sure of counts a little: it may be surely wrong
    labeled = np.flatnonzero((labels >= 0) & guesses.mask)
    nearest = np.full(len(rows), np.inf)
    for row in labeled:
        np.minimum(nearest, _distances(points, space[row]), out=nearest)
    if not len(labeled) and len(rows):  # the first is the most ordinary: an outlier teaches little
        nearest = 1 / (1e-9 + _distances(points, points.mean(0)))
    counts = np.bincount(labels[labeled], minlength=guesses.probabilities.shape[1]).astype(float)
    free = np.ones(len(rows), bool)
    places = np.empty(count, np.int64)
    for n in range(count):
        left = np.unique(predicted[free])
        here = free & (predicted == left[counts[left].argmin()])  # the class with the fewest labels
        score = np.where(here, weight * nearest, -1.0)
        place = int(score.argmax())
        places[n] = place
        free[place] = False
        counts[predicted[place]] += 1
        distance = _distances(points, points[place])
        nearest = distance if n == 0 and not len(labeled) else np.minimum(nearest, distance)
    return places


def _distances(points: np.ndarray, point: np.ndarray) -> np.ndarray:
    difference = points - point
    return np.einsum("nf,nf->n", difference, difference)


def standardize(features: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return features (N, F) with mean 0 and deviation 1 over the known rows; a constant one becomes 0."""
    rows = features[mask].astype(np.float64)
    if not len(rows):
        return np.zeros(features.shape)
    mean, deviation = rows.mean(0), rows.std(0)
    return np.where(mask[:, None], (features - mean) / np.where(deviation > 1e-12, deviation, 1.0), 0.0)
