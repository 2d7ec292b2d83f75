"""Statistics of a split: sizes, class distributions, and the two imbalances of FedDure (AAAI 2024).

Internal imbalance is the distance between the class distributions of a client's labeled and unlabeled rows. External
imbalance is the distance between a client's class distribution and that of all clients together.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfmoon.data.images import UNKNOWN
from halfmoon.data.partition.split import SERVER, Split


def count_rows(split: Split, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Count the labeled and the unlabeled images of each client and class.

    Args:
        split: The client of each of N images, and the labeled ones.
        labels: The true label of each image, int64 (N,); images with an unknown label are not counted.
        classes: The number of classes.

    Returns:
        The counts of labeled and of unlabeled images, each int64 (clients, classes).
    """

    def count_selected(selection: np.ndarray) -> np.ndarray:
        """Count the images of a mask, bool (N,), by client and class."""
        # One bincount over the flat index of the table (clients, classes).
        cells = split.client[selection] * classes + labels[selection]
        return np.bincount(cells, minlength=split.clients * classes).reshape(split.clients, classes)

    countable = (split.client >= 0) & (labels != UNKNOWN)
    return count_selected(countable & split.labeled), count_selected(countable & ~split.labeled)


def class_shares(numbers: np.ndarray) -> np.ndarray:
    """Normalize counts (..., classes) to sum to 1; rows of zeros become NaN."""
    total = numbers.sum(-1, keepdims=True)
    return np.divide(numbers, total, out=np.full(numbers.shape, np.nan), where=total > 0)


def total_variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Compute the total variation distance between class shares (..., classes): 0 if equal, 1 without a common class."""
    return np.abs(p - q).sum(-1) / 2


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Compute the Jensen-Shannon divergence (Lin 1991) between class shares (..., classes) in bits, 0 to 1."""
    middle = (p + q) / 2
    return (_entropy(middle) - (_entropy(p) + _entropy(q)) / 2).clip(0, 1)


def summarize(split: Split, labels: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    """Compute all statistics of a split, ready for JSON. Distances to an empty set are None, and not part of means.

    Numbers of images include those whose true label is unknown; counts by class and distances do not.

    Returns:
        counts: images, labeled (including the server's), unlabeled, nobody (rows without a client), clients, classes;
        server: None, or counts of the server's labeled rows (labeled, labeled_classes) with tv and js between their
        class distribution and that of the unlabeled rows of all clients;
        stages: the number of unlabeled rows of each stage, one number without stages;
        each: for every client labeled, unlabeled, class counts labeled_classes and unlabeled_classes, tv and js;
        sizes: min, median, max of the clients' labeled and unlabeled rows;
        present: the mean number of classes among a client's labeled and unlabeled rows;
        internal, internal_js: mean, min, max over clients of total variation (tv) and Jensen-Shannon divergence (js);
        external: the same of total variation between a client and all clients, for labeled and unlabeled rows.
    """
    labeled, unlabeled = count_rows(split, labels, len(classes))
    tv, js = _distances(labeled, unlabeled)
    tables = {"labeled": labeled, "unlabeled": unlabeled}
    sizes = {"labeled": _count_by_client(split, split.labeled), "unlabeled": _count_by_client(split, ~split.labeled)}
    server = _summarize_server(split, labels, unlabeled.sum(0))
    return {
        "counts": {
            "images": len(split),
            "labeled": int(sizes["labeled"].sum()) + (server["labeled"] if server else 0),
            "unlabeled": int(sizes["unlabeled"].sum()),
            "nobody": int((split.client == -1).sum()),
            "clients": split.clients,
            "classes": list(classes),
        },
        "server": server,
        "stages": _count_stages(split),
        "each": [
            {
                "labeled": int(sizes["labeled"][k]),
                "unlabeled": int(sizes["unlabeled"][k]),
                "labeled_classes": labeled[k].tolist(),
                "unlabeled_classes": unlabeled[k].tolist(),
                "tv": _to_float(tv[k]),
                "js": _to_float(js[k]),
            }
            for k in range(split.clients)
        ],
        "sizes": {name: _size_range(counts) for name, counts in sizes.items()},
        "present": {name: float((table > 0).sum(1).mean()) for name, table in tables.items()},
        "internal": _value_range(tv),
        "internal_js": _value_range(js),
        "external": {
            name: _value_range(total_variation(class_shares(table), class_shares(table.sum(0))))
            for name, table in tables.items()
        },
    }


def _count_by_client(split: Split, selected: np.ndarray) -> np.ndarray:
    """Count the selected images, bool (N,), of each client: int64 (clients,)."""
    return np.bincount(split.client[selected & (split.client >= 0)], minlength=split.clients)


def _summarize_server(split: Split, labels: np.ndarray, unlabeled: np.ndarray) -> dict[str, Any] | None:
    """Compute the server's section of the summary; `unlabeled` (classes,) are the counts of all clients."""
    rows = split.rows(SERVER, True)
    if not rows.size:
        return None
    by_class = np.bincount(labels[rows], minlength=len(unlabeled))
    tv, js = map(_to_float, _distances(by_class, unlabeled))
    return {"labeled": len(rows), "labeled_classes": by_class.tolist(), "tv": tv, "js": js}


def _distances(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute total variation and Jensen-Shannon divergence between the distributions of counts (..., classes)."""
    return total_variation(class_shares(p), class_shares(q)), jensen_shannon(class_shares(p), class_shares(q))


def _count_stages(split: Split) -> list[int]:
    """Count the clients' unlabeled rows of each stage."""
    mask = (split.client >= 0) & ~split.labeled
    if split.stage is None:
        return [int(mask.sum())]
    return np.bincount(split.stage[mask], minlength=split.stages).tolist()


def _entropy(p: np.ndarray) -> np.ndarray:
    """Compute the entropy of class shares (..., classes) in bits."""
    # 0 log 0 = 0 by convention; NaN remains NaN.
    return -(p * np.log2(np.where(p > 0, p, 1.0))).sum(-1)


def _size_range(sizes: np.ndarray) -> dict[str, float]:
    return {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())}


def _value_range(values: np.ndarray) -> dict[str, float | None]:
    values = values[~np.isnan(values)]
    if not values.size:
        return {"mean": None, "min": None, "max": None}
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}


def _to_float(value: np.ndarray | np.floating) -> float | None:
    return None if np.isnan(value) else float(value)
