"""How rows are dealt or spread among clients.

The rules are those of FedMatch and FedDure (AAAI 2024); a Dirichlet over clients for each class goes back to
Yurochkin et al. 2019, as do its cap and smallest size. Every draw comes from an explicit generator.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from halfmoon.core.errors import UserError


def named_generator(seed: int, *path: str) -> np.random.Generator:
    """Return the PCG64 generator of a seed and a path of words; other words give an independent stream."""
    digest = hashlib.sha256("\0".join((str(seed), *path)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


class GroupHoldout:
    """Hold out rows so that a group, such as a patient, is on one side alone, over any number of draws."""

    def __init__(self) -> None:
        self.by_group: dict[str, bool] = {}  # whether it is held out

    def draw(self, order: np.ndarray, groups: Sequence[str], count: int) -> np.ndarray:
        """Return which of the rows in `order` are held out: the first, about `count`, each with all of its group.

        `groups` has the group of every row; one of "" is alone. A group of an earlier draw stays on its side.
        """
        rows: list[int] = order.tolist()
        selection = [row for row in rows if self.by_group.get(groups[row], False)]
        together: dict[str, list[int]] = {}
        for row in rows:
            together.setdefault(groups[row], []).append(row)
        for row in rows:
            group = groups[row]
            if group in self.by_group:
                continue
            members = together[group] if group else [row]
            # A large group would be more than the half of it too much.
            out = len(selection) < count and (not selection or len(selection) + len(members) / 2 <= count)
            selection += members if out else []
            if group:
                self.by_group[group] = out
        return np.array(selection, np.int64)


def apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """Return whole numbers proportional to `weights` that add up to `total` (largest remainders)."""
    exact = weights * total
    parts = exact // weights.sum()
    order = np.argsort(-(exact % weights.sum()), kind="stable")
    parts[order[: total - int(parts.sum())]] += 1
    return parts


def draw_labeled(labels: np.ndarray, counts: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return which rows are labeled, bool (N,): the first counts[c] of a permutation inside each class c."""
    labeled = np.zeros(len(labels), bool)
    for label, count in enumerate(counts):
        labeled[draw.permutation(np.flatnonzero(labels == label))[:count]] = True
    return labeled


def deal_evenly(labels: np.ndarray, clients: int, draw: np.random.Generator) -> np.ndarray:
    """Return the client of each row, int64 (N,), dealt like cards: classes in turn, shuffled inside.

    Any two clients differ by at most one row in every class, and by at most one row in all.
    """
    order = np.concatenate([draw.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)])
    holder = np.empty(len(labels), np.int64)
    holder[order] = draw.permutation(clients)[np.arange(len(labels)) % clients]
    return holder


def rows_by_client(client: np.ndarray, clients: int) -> list[np.ndarray]:
    """Return the rows of each client, int64, sorted, of the client of each row (N,); looked for once for all."""
    order = np.argsort(client, kind="stable")
    return np.split(order, np.searchsorted(client[order], np.arange(clients + 1)))[1 : clients + 1]


MAX_SHORT_CLIENTS = 12
"""Clients below the smallest size in each of three draws, from which on no draw is waited for in which there are none:
they come about as often as e^-12, one in 160,000."""


def spread_by_dirichlet(
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
    All classes are redrawn while the smallest client has fewer than `min_size` rows, at most `tries` times, and at most
    three times if `MAX_SHORT_CLIENTS` or more clients have fewer in each draw. `what` names the rows in the message.

    Raises:
        UserError: if no draw gives each client `min_size` rows; the message suggests values that would succeed.
    """
    best, fewest, number = -1, clients, 0
    for number in range(1, tries + 1):
        holder = _spread_once(labels, clients, dirichlet_alpha, draw, cap)
        sizes = np.bincount(holder, minlength=clients)
        short = int((sizes < min_size).sum())
        if not short:
            return holder
        best, fewest = max(best, int(sizes.min())), min(fewest, short)
        if number >= 3 and fewest >= MAX_SHORT_CLIENTS:
            break
    ways = _suggest_changes(labels, clients, dirichlet_alpha, min_size, cap)
    if best > 0:
        ways.append(f"set min_size to {best} or less")
    raise UserError(
        f"in {number} draws no split with dirichlet_alpha {dirichlet_alpha:g} gave each of {clients} clients "
        f"{min_size} {what}; the best minimum was {best}, and {fewest} or more had fewer. {_join_suggestions(ways)}."
    )


def _suggest_changes(labels: np.ndarray, clients: int, dirichlet_alpha: float, min_size: int, cap: bool) -> list[str]:
    """Return which larger alpha, and which smaller number of clients, gives everyone enough, tried in three draws."""

    def enough(count: int, alpha: float) -> bool:
        draw = named_generator(0, "what would")
        holders = (_spread_once(labels, count, alpha, draw, cap) for _ in range(3))
        return any(int(np.bincount(holder, minlength=count).min()) >= min_size for holder in holders)

    alphas = (dirichlet_alpha * 2**k for k in range(1, 8))
    counts = (clients >> k for k in range(1, clients.bit_length() - 1))
    alpha = next((each for each in alphas if enough(clients, each)), None)
    count = next((each for each in counts if enough(each, dirichlet_alpha)), None)
    ways = [] if alpha is None else [f"raise dirichlet_alpha to {alpha:g}"]
    return ways if count is None else [*ways, f"ask for {count} clients"]


def _join_suggestions(ways: list[str]) -> str:
    *most, last = ways or ["ask for fewer clients"]
    text = f"{', '.join(most)}, or {last}" if most else last
    return text[0].upper() + text[1:]


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
