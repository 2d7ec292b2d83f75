"""What a split is like, in numbers: sizes, class mixes, and the two imbalances of FedDure (AAAI 2024).

Internal imbalance lies inside a client, between its labeled and its unlabeled rows; external imbalance lies
between clients, each client's mix against the mix of all.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfmoon.data.images import UNKNOWN
from halfmoon.data.partition.split import SERVER, Split


def count_rows(split: Split, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of each client and class, labeled and unlabeled, each int64 (clients, classes).

    Rows whose label nobody knows are left out.
    """

    def of(mine: np.ndarray) -> np.ndarray:
        cells = split.client[mine] * classes + labels[mine]
        return np.bincount(cells, minlength=split.clients * classes).reshape(split.clients, classes)

    mask = (split.client >= 0) & (labels != UNKNOWN)
    return of(mask & split.labeled), of(mask & ~split.labeled)


def class_shares(numbers: np.ndarray) -> np.ndarray:
    """Return counts (..., classes) as shares that add up to 1; a row without any count becomes NaN."""
    total = numbers.sum(-1, keepdims=True)
    return np.divide(numbers, total, out=np.full(numbers.shape, np.nan), where=total > 0)


def total_variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return half the summed absolute difference of shares (..., classes): 0 is equal, 1 shares no class."""
    return np.abs(p - q).sum(-1) / 2


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the Jensen-Shannon divergence (Lin 1991) of shares (..., classes) in bits, 0 to 1."""
    middle = (p + q) / 2
    return (_entropy(middle) - (_entropy(p) + _entropy(q)) / 2).clip(0, 1)


def summarize(split: Split, labels: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    """Return the split in numbers, ready for JSON; a distance to an empty side is None and left out of means.

    counts: images, labeled (the server's too), unlabeled, nobody (rows that no one holds), clients, classes;
    server: None, or the server's labeled rows (labeled, labeled_classes) with tv and js between their class mix and
    that of the unlabeled rows of all clients;
    stages: unlabeled rows to be seen in each stage, one number where nothing streams;
    each: for every client labeled, unlabeled, class counts labeled_classes and unlabeled_classes, tv and js;
    sizes: min, median, max of the clients' labeled and unlabeled rows;
    present: mean number of classes a client has among its labeled and its unlabeled rows;
    internal, internal_js: mean, min, max over clients of total variation and Jensen-Shannon;
    external: the same of total variation, for labeled and unlabeled rows against those of all clients.
    """
    labeled, unlabeled = count_rows(split, labels, len(classes))
    tv, js = _distances(labeled, unlabeled)
    parts = {"labeled": labeled, "unlabeled": unlabeled}
    server = _summarize_server(split, labels, unlabeled.sum(0))
    return {
        "counts": {
            "images": len(split),
            "labeled": int(labeled.sum()) + (server["labeled"] if server else 0),
            "unlabeled": int(unlabeled.sum()),
            "nobody": int((split.client == -1).sum()),
            "clients": split.clients,
            "classes": list(classes),
        },
        "server": server,
        "stages": _count_stages(split),
        "each": [
            {
                "labeled": int(labeled[k].sum()),
                "unlabeled": int(unlabeled[k].sum()),
                "labeled_classes": labeled[k].tolist(),
                "unlabeled_classes": unlabeled[k].tolist(),
                "tv": _to_float(tv[k]),
                "js": _to_float(js[k]),
            }
            for k in range(split.clients)
        ],
        "sizes": {word: _size_range(part.sum(1)) for word, part in parts.items()},
        "present": {word: float((part > 0).sum(1).mean()) for word, part in parts.items()},
        "internal": _value_range(tv),
        "internal_js": _value_range(js),
        "external": {
            word: _value_range(total_variation(class_shares(part), class_shares(part.sum(0))))
            for word, part in parts.items()
        },
    }


def _summarize_server(split: Split, labels: np.ndarray, unlabeled: np.ndarray) -> dict[str, Any] | None:
    """Return the server's part of the summary; `unlabeled` (classes,) are the counts of all clients."""
    rows = split.rows(SERVER, True)
    if not rows.size:
        return None
    by_class = np.bincount(labels[rows], minlength=len(unlabeled))
    tv, js = map(_to_float, _distances(by_class, unlabeled))
    return {"labeled": len(rows), "labeled_classes": by_class.tolist(), "tv": tv, "js": js}


def _distances(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return total variation and Jensen-Shannon divergence of the mixes of counts (..., classes)."""
    return total_variation(class_shares(p), class_shares(q)), jensen_shannon(class_shares(p), class_shares(q))


def _count_stages(split: Split) -> list[int]:
    mask = (split.client >= 0) & ~split.labeled
    if split.stage is None:
        return [int(mask.sum())]
    return np.bincount(split.stage[mask], minlength=split.stages).tolist()


def _entropy(p: np.ndarray) -> np.ndarray:
    # 0 log 0 is 0; NaN stays NaN.
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
