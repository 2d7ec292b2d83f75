"""Near-duplicates: the same picture at another size or compression, found by small gray thumbnails.

Thumbnails of 16 x 16 pixels are centered and scaled to length 1. Two images are near-duplicates if their thumbnails
differ by at most `MAX_DISTANCE`, and their colors and contrasts by little. This finds no pair among the 60,000 images
of CIFAR-10 and the 5,332 of PneumoniaMNIST, and 38 among the 70,000 of Fashion-MNIST, each of one class. Of 1,000
images of CIFAR-10, enlarged to 256 pixels and then halved or compressed (JPEG 75 to 30), it finds 96 to 100 %.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from scipy.spatial import KDTree

THUMBNAIL_SIDE = 16

MIN_SIDE = 16
"""Shorter side in pixels of images that are compared: different smaller ones may have nearly equal pixels."""

MAX_DISTANCE = 0.03
"""Largest Euclidean distance between the thumbnails of near-duplicates, which have length 1."""

MAX_COLOR_DIFFERENCE = 8.0
"""Largest difference between the mean values of a channel of near-duplicates, of 255."""

MIN_CONTRAST = 4.0
"""Smallest standard deviation of a thumbnail that is compared, of 255: below, rounding hides the picture."""

MAX_CONTRAST_RATIO = 1.1
"""Largest ratio of the contrasts of near-duplicates."""

LOW_FREQUENCIES = 4
"""Side of the square of lowest frequencies by which candidates are searched."""

MAX_PAIRS_PER_IMAGE = 20
"""Candidate pairs an image above which only the nearest candidates of each image are compared."""

NEAREST_CANDIDATES = 5
"""The number of these nearest candidates."""

_LAST_PAIRS: dict[tuple[tuple[int, ...], tuple[bytes, ...]], np.ndarray] = {}
"""The pairs of the images that were compared last, by the shape and the hashes of all of them."""

MAX_SHARE = 0.2
"""Share of near-duplicates among all images above which they are rather frames of one video, and are not grouped."""


def find_near_duplicates(parts: Sequence[np.ndarray], hashes: Sequence[bytes]) -> np.ndarray:
    """Find pairs of different images that are near-duplicates.

    Args:
        parts: arrays of images, uint8 (N, H, W, C); the images of all parts are numbered one part after the other.
        hashes: the hash of each image's pixels; of equal images only the first one is compared.

    Returns:
        The numbers of the images of each pair, int64 (P, 2), the smaller one first.
    """
    if any(min(images.shape[1:3]) < MIN_SIDE for images in parts) or sum(map(len, parts)) < 2:
        return np.empty((0, 2), np.int64)
    # A folder is searched when it is divided, and again when copies are grouped: usually the same images in one order.
    key = (parts[0].shape[1:], tuple(hashes))
    pairs = _LAST_PAIRS.get(key)
    if pairs is None:
        pairs = _compare_images(parts, hashes)
        _LAST_PAIRS.clear()
        _LAST_PAIRS[key] = pairs
    return pairs.copy()


def _compare_images(parts: Sequence[np.ndarray], hashes: Sequence[bytes]) -> np.ndarray:
    """Find pairs of near-duplicates among two or more images with `MIN_SIDE` pixels or more, as `find_near_duplicates`."""
    from scipy.fft import dctn  # slow to import
    from scipy.spatial import KDTree

    thumbnails = np.concatenate([_shrink(images) for images in parts])
    colors = np.concatenate([_mean_colors(images) for images in parts])
    thumbnails -= thumbnails.mean((1, 2), keepdims=True)
    lengths = np.linalg.norm(thumbnails, axis=(1, 2))
    contrasts = lengths / THUMBNAIL_SIDE
    first_of = {image_hash: row for row, image_hash in reversed([*enumerate(hashes)])}
    rows = np.array([row for row in sorted(first_of.values()) if contrasts[row] >= MIN_CONTRAST], np.int64)
    if len(rows) < 2:
        return np.empty((0, 2), np.int64)
    units = thumbnails[rows] / lengths[rows, None, None]
    # The transform preserves distances, so those of the lowest frequencies are lower bounds of the whole distance.
    spectra = np.asarray(dctn(units, axes=(1, 2), norm="ortho"))
    low = spectra[:, :LOW_FREQUENCIES, :LOW_FREQUENCIES].reshape(len(rows), -1)
    search = KDTree(low)
    # Each pair counts twice, and each image is its own neighbor.
    pair_count = (int(search.count_neighbors(search, MAX_DISTANCE)) - len(rows)) // 2
    if pair_count <= MAX_PAIRS_PER_IMAGE * len(rows):
        pairs = search.query_pairs(MAX_DISTANCE, output_type="ndarray")
    else:
        # Frames of a video: all pairs of thousands of images would not fit into memory.
        pairs = _nearest_pairs(search, low)
    first, second = rows[pairs[:, 0]], rows[pairs[:, 1]]
    distances = np.array([np.linalg.norm(units[a] - units[b]) for a, b in pairs])
    ratios = np.maximum(contrasts[first], contrasts[second]) / np.minimum(contrasts[first], contrasts[second])
    is_near = (distances <= MAX_DISTANCE) & (ratios <= MAX_CONTRAST_RATIO)
    is_near &= np.abs(colors[first] - colors[second]).max(1, initial=0) <= MAX_COLOR_DIFFERENCE
    near_pairs = np.sort(np.stack([first, second], axis=1)[is_near], axis=1).astype(np.int64)
    return near_pairs[np.lexsort((near_pairs[:, 1], near_pairs[:, 0]))]


def join_near_duplicates(pairs: np.ndarray, hashes: Sequence[bytes]) -> list[bytes]:
    """Give near-duplicates one hash, so that they are grouped like equal images.

    Args:
        pairs: the pairs of near-duplicates, from `find_near_duplicates`.
        hashes: the hash of each image's pixels.

    Returns:
        The hashes, of which near-duplicates have that of the first of them; unchanged if more than `MAX_SHARE` of the
        images are near-duplicates of others.
    """
    if len(np.unique(pairs)) > MAX_SHARE * len(hashes):
        return list(hashes)
    parent: dict[bytes, bytes] = {}

    def find_root(key: bytes) -> bytes:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for first, second in pairs.tolist():
        parent[find_root(hashes[second])] = find_root(hashes[first])
    return [find_root(image_hash) for image_hash in hashes]


def describe_near_duplicates(pairs: np.ndarray, train_count: int, test_count: int = 0) -> list[str]:
    """Describe in sentences for the user the images that are near-duplicates of others.

    Args:
        pairs: the pairs of near-duplicates, from `find_near_duplicates`, of the training images and after them the test
            images.
        train_count: the number of training images.
        test_count: the number of test images.
    """
    if not len(pairs):
        return []
    count = train_count + test_count
    near = len(np.unique(pairs))
    if near > MAX_SHARE * count:
        return [
            f"{near:,} of {count:,} images are nearly equal to others, as frames of a video are: if they are, give each "
            "video a group (group_pattern, or the column group of labels.csv), or the accuracy is too high"
        ]
    in_both = len(np.unique(pairs[(pairs[:, 0] < train_count) & (pairs[:, 1] >= train_count), 1]))
    where = "" if in_both else ": all are on one side of a split"
    notes = [f"{near:,} of {count:,} images are near-duplicates (one picture at several sizes or compressions){where}"]
    if in_both:
        notes.append(
            f"{in_both:,} of {test_count:,} test images are near-duplicates of training images, so the accuracy is too high: "
            "remove them from one of the two"
        )
    return notes


def _nearest_pairs(search: "KDTree", points: np.ndarray) -> np.ndarray:
    """Find the pairs of each point and its `NEAREST_CANDIDATES` nearest others within `MAX_DISTANCE`.

    Args:
        search: the search tree of the points.
        points: float (N, D).

    Returns:
        The numbers of the points of each pair, int64 (P, 2), each pair once.
    """
    count = min(NEAREST_CANDIDATES + 1, len(points))  # the nearest one is usually the point
    _, neighbors = search.query(points, k=count, distance_upper_bound=MAX_DISTANCE)
    pairs = np.stack([np.repeat(np.arange(len(points)), count), neighbors.reshape(-1)], axis=1)
    # A missing neighbor has the number N.
    is_pair = (pairs[:, 1] < len(points)) & (pairs[:, 0] != pairs[:, 1])
    return np.unique(np.sort(pairs[is_pair], axis=1), axis=0)


def _shrink(images: np.ndarray) -> np.ndarray:
    """Shrink images uint8 (N, H, W, C) to gray thumbnails, float32 (N, `THUMBNAIL_SIDE`, `THUMBNAIL_SIDE`)."""
    thumbnails = np.empty((len(images), THUMBNAIL_SIDE, THUMBNAIL_SIDE), np.float32)
    for row, pixels in enumerate(images):
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels))
        small = image.convert("L").resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BOX)
        thumbnails[row] = np.asarray(small)
    return thumbnails


def _mean_colors(images: np.ndarray) -> np.ndarray:
    """Compute the mean of each channel of images uint8 (N, H, W, C), float64 (N, C)."""
    count, height, width, channels = images.shape
    # Summing whole rows first is many times faster than a mean over both axes, and integer sums are exact.
    columns = [pixels.reshape(height, -1).sum(0, dtype=np.uint32) for pixels in images]
    sums = np.array(columns, np.uint32).reshape(count, width, channels).sum(1, dtype=np.uint64)
    return sums / (height * width)
