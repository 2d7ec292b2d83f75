"""How rows are dealt or spread among clients.

The rules are those of FedMatch and FedDure (AAAI 2024); a Dirichlet over clients for each class goes back to
Yurochkin et al. 2019, as do its cap and smallest size. Every draw comes from an explicit generator.
"""

from __future__ import annotations

import hashlib

import numpy as np

from halfmoon.core.errors import UserError


def stream(seed: int, *path: str) -> np.random.Generator:
    """Return the PCG64 generator of a seed and a path of words; other words give an independent stream."""
    digest = hashlib.sha256("\0".join((str(seed), *path)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


def apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """Return whole numbers proportional to `weights` that add up to `total` (largest remainders)."""
    exact = weights * total
    parts = exact // weights.sum()
    order = np.argsort(-(exact % weights.sum()), kind="stable")
    parts[order[: total - int(parts.sum())]] += 1
    return parts


def take_labeled(labels: np.ndarray, counts: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return which rows are labeled, bool (N,): the first counts[c] of a permutation inside each class c."""
    chosen = np.zeros(len(labels), bool)
    for label, count in enumerate(counts):
        chosen[draw.permutation(np.flatnonzero(labels == label))[:count]] = True
    return chosen


def deal(labels: np.ndarray, clients: int, draw: np.random.Generator) -> np.ndarray:
    """Return the client of each row, int64 (N,), dealt like cards: classes in turn, shuffled inside.

    Any two clients differ by at most one row in every class, and by at most one row in all.
    """
    order = np.concatenate([draw.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)])
    holder = np.empty(len(labels), np.int64)
    holder[order] = draw.permutation(clients)[np.arange(len(labels)) % clients]
    return holder


def spread(
    labels: np.ndarray,
    clients: int,
    dirichlet_alpha: float,
    draw: np.random.Generator,
    *,
    min_size: int,
    cap: bool = True,
    tries: int = 100,
    what: str = "rows",
) -> np.ndarray:
    """Return the client of each row, int64 (N,), each class shared out by Dirichlet(alpha) over clients.

    For each class: shares p ~ Dir(alpha); with `cap`, clients that already hold N / clients rows get no more;
    p is normalised, and the class is cut at floor(cumsum(p) * rows), the last client taking the remainder.
    Everything is drawn again while the smallest client has fewer than `min_size` rows, at most `tries` times;
    then UserError is raised with the best minimum found. `what` names the rows in that message.
    """
    best = -1
    for _ in range(tries):
        holder = _spread_once(labels, clients, dirichlet_alpha, draw, cap)
        smallest = int(np.bincount(holder, minlength=clients).min())
        if smallest >= min_size:
            return holder
        best = max(best, smallest)
    advice = f"set min_size to {best} or less" if best > 0 else "ask for fewer clients"
    raise UserError(
        f"in {tries} draws no split with dirichlet_alpha {dirichlet_alpha:g} gave each of {clients} clients {min_size} "
        f"{what}; the best minimum was {best}. Raise dirichlet_alpha, or {advice}."
    )


def _spread_once(
    labels: np.ndarray, clients: int, dirichlet_alpha: float, draw: np.random.Generator, cap: bool
) -> np.ndarray:
    holder = np.empty(len(labels), np.int64)
    sizes = np.zeros(clients, np.int64)
    for label in np.unique(labels):
        rows = draw.permutation(np.flatnonzero(labels == label))
        shares = draw.dirichlet(np.full(clients, dirichlet_alpha))
        # Compared in whole numbers: size >= N / clients. Some client is always below while rows are left.
        open_ = sizes * clients < len(labels) if cap else np.ones(clients, bool)
        shares = np.where(open_, shares, 0.0)
        total = shares.sum()
        if total > 0:
            shares = shares / total
        else:
            # A small alpha can leave nothing to those still below the cap. Renormalised shares of a part of the
            # clients are Dirichlet themselves, so drawing for that part alone is the same rule.
            shares = np.zeros(clients)
            shares[open_] = draw.dirichlet(np.full(int(open_.sum()), dirichlet_alpha))
        cuts = (np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        counts = np.diff(np.concatenate(([0], np.minimum(cuts, len(rows)), [len(rows)])))
        holder[rows] = np.repeat(np.arange(clients), counts)
        sizes += counts
    return holder
