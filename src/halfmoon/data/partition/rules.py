"""How SemiFL, FedDB, FedLoKe and FedMatch hand rows to clients, each rule named after what it does.

Every rule returns the client of each row of a part, int64 (N,), -1 for a row that nobody gets. Departures from the
authors' code are named.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from halfmoon.api.split_options import SplitOptions
from halfmoon.core.errors import UserError
from halfmoon.data.partition.primitives import apportion, spread_by_dirichlet

FEDMATCH_CLASS_PROBABILITIES = (0.50, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15)
"""FedMatch's class probabilities of a client of type 0; the type moves them along."""

_MAX_FITTING_STEPS = 2000
_MIN_FRACTION = 1e-3


class RowPool(NamedTuple):
    """What a rule shares out: rows with these labels, int (N,), among so many clients; all draws come from `draw`."""

    labels: np.ndarray
    names: Sequence[str]  # of the classes, by label
    clients: int
    draw: np.random.Generator
    what: str  # the rows, in messages

    def check(self, least: int = 1) -> None:
        """Raise UserError where there are fewer than `least` rows for each client."""
        rows, clients = len(self.labels), self.clients
        if least * clients > rows:
            raise UserError(
                f"{clients} clients with at least {least} {self.what} images each need {least * clients}, but "
                f"there are {rows}; ask for fewer clients, a smaller min_size or another share of labels."
            )


def cut_evenly(options: SplitOptions, part: RowPool) -> np.ndarray:
    """Give floor(rows / clients) random rows to each client and the remainder to nobody (SemiFL, NeurIPS 2022, IID).

    Classes are not balanced inside a client, as in the authors' code.
    """
    part.check()
    rows, each = len(part.labels), len(part.labels) // part.clients
    holder = np.full(rows, -1, np.int64)
    holder[part.draw.permutation(rows)[: each * part.clients]] = np.repeat(np.arange(part.clients), each)
    return holder


def cut_shards(options: SplitOptions, part: RowPool) -> np.ndarray:
    """Give each client `classes_per_client` random shards of one class each (SemiFL, NeurIPS 2022, "K classes").

    A class, in the order of the rows, is cut into clients * classes_per_client / classes contiguous shards; rows left
    over go one each to its first shards. A client may draw two shards of a class, so it has at most that many classes.
    Raise UserError where the shards of a class are no whole number or more than its rows.
    """
    labels, names, clients, draw, what = part
    per_client = options.classes_per_client
    classes = len(names)
    shards, odd = divmod(clients * per_client, classes)
    if odd:
        step = classes // math.gcd(classes, per_client)
        raise UserError(
            f"{clients} clients with {per_client} shards each make {clients * per_client} shards, which {classes} "
            f"classes cannot supply evenly; choose clients as a multiple of {step}, or another classes_per_client."
        )
    order = draw.permutation(classes * shards)
    holder = np.empty(len(labels), np.int64)
    for label, name in enumerate(names):
        rows = np.flatnonzero(labels == label)
        if len(rows) < shards:
            raise UserError(
                f"class {name} has {len(rows)} {what} images to share, fewer than its {shards} shards; ask for fewer "
                "clients, a smaller classes_per_client or another number of labels."
            )
        mine = order[label * shards : (label + 1) * shards] // per_client
        sizes = len(rows) // shards + (np.arange(shards) < len(rows) % shards)
        holder[rows] = np.repeat(mine, sizes)
    return holder


def fill_in_turn(options: SplitOptions, part: RowPool) -> np.ndarray:
    """Fill clients of floor(N / clients) rows one after another from class pools (FedLoKe, CIKM 2023, authors' code).

    For each client: q ~ Dirichlet(alpha) over the classes, round(q * size) rows of each, the rounding error on the
    largest. What an exhausted class cannot give comes from the lowest class that has rows: late clients are no
    Dirichlet draws. The last client takes all that is left; what it has above the others goes to nobody.
    """
    part.check()
    labels, clients, draw = part.labels, part.clients, part.draw
    pools = _shuffle_by_class(part)
    left = np.array([len(pool) for pool in pools])
    size = len(labels) // clients
    counts = np.zeros((clients, len(pools)), np.int64)
    for k in range(clients - 1):
        shares = draw.dirichlet(np.full(len(pools), options.dirichlet_alpha))
        quota = np.round(shares * size).astype(np.int64)
        quota[shares.argmax()] += size - quota.sum()
        if quota.min() < 0:
            # A few rows over many classes can round up to more than the largest class can take back.
            quota = apportion(shares, size).astype(np.int64)
        amounts = np.minimum(quota, left)
        # The lowest classes first: each gives what it has until the client is full.
        spare = np.cumsum(left - amounts)
        top_up = np.diff(np.minimum(spare, size - amounts.sum()), prepend=0)
        counts[k] = amounts + top_up
        left -= counts[k]
    counts[-1] = left
    holder = _assign_counts(counts, pools, len(labels))
    holder[draw.permutation(np.flatnonzero(holder == clients - 1))[size:]] = -1
    return holder


def fill_together(options: SplitOptions, part: RowPool) -> np.ndarray:
    """Fill clients of floor(N / clients) rows by Dirichlet(alpha) mixes that are fitted to the class pools together.

    `fill_in_turn` without its bias of order: the clients' mixes are drawn first, then changed as little as the
    pools demand (`fit_counts`), so that early and late clients are alike. Fewer than `clients` rows go to nobody.
    """
    part.check()
    return _assign_fitted(part, _log_dirichlet(options.dirichlet_alpha, (part.clients, len(part.names)), part.draw))


def pair_blocks(options: SplitOptions, part: RowPool, min_size: int, tries: int) -> np.ndarray:
    """Cut the rows into even random blocks, and each of them by Dirichlet(alpha) between two clients (SAGE, CVPR 2025).

    Inside a block every class is shared out as in `primitives.spread`, with its cap; then the sizes are made equal: the
    larger client's surplus, rows of its highest classes, goes to the other. So alpha says little: on CIFAR-10 with 20
    clients the exponential of a client's class entropy is 5.9, 7.2 and 7.9 at alpha 0.1, 0.5 and 1, where an ordinary
    Dirichlet has 2.6, 5.5 and 7.0. Rows beyond clients * floor(N / clients) go to nobody. Of an odd number
    of clients the last one has half a block for itself.
    """
    part.check(max(1, min_size))
    labels, _, clients, draw, what = part
    each = len(labels) // clients
    holder = np.full(len(labels), -1, np.int64)
    order = draw.permutation(len(labels))
    holder[order[2 * each * (clients // 2) : each * clients]] = clients - 1
    for block in range(clients // 2):
        rows = order[2 * each * block : 2 * each * (block + 1)]
        side = spread_by_dirichlet(
            labels[rows], 2, options.dirichlet_alpha, draw, min_size=min_size, tries=tries, what=f"{what} images"
        )
        larger = int(side.mean() > 0.5)
        own = np.flatnonzero(side == larger)
        highest = own[np.argsort(labels[rows][own], kind="stable")][each:]
        side[highest] = 1 - larger
        holder[rows] = 2 * block + side
    return holder


def give_equal_classes(options: SplitOptions, part: RowPool) -> np.ndarray:
    """Give every client the same number of rows of every class (FedMatch, ICLR 2021, batch IID).

    It is the number that the smallest class allows; the rest goes to nobody. Raise UserError where a class has fewer
    rows than there are clients.
    """
    totals = np.bincount(part.labels, minlength=len(part.names))
    each = int(totals.min()) // part.clients
    if not each:
        raise UserError(
            f"class {part.names[int(totals.argmin())]} has {totals.min()} {part.what} images to share, fewer than one "
            f"for each of {part.clients} clients; ask for fewer clients or another number of labels, or choose setting "
            "iid-iid."
        )
    return _assign_counts(np.full((part.clients, len(totals)), each), _shuffle_by_class(part), len(part.labels))


def give_peaked(options: SplitOptions, part: RowPool) -> np.ndarray:
    """Give client k floor(N / clients) rows with half of them from class k mod classes (FedMatch, batch non-IID).

    Counts are the expected ones of `fedmatch_class_probabilities`, fitted to the class pools where these are uneven;
    the authors' code takes rows class by class until a pool is empty. Fewer than `clients` rows go to nobody.
    """
    part.check()
    classes = len(part.names)
    types = np.arange(part.clients) % classes
    shares = fedmatch_class_probabilities(classes)[(np.arange(classes) - types[:, None]) % classes]
    return _assign_fitted(part, np.log(shares))


def fedmatch_class_probabilities(classes: int) -> np.ndarray:
    """Return the class probabilities of a client of type 0, (classes,): PEAKED for ten classes.

    For another number: 50 to the own class, 15 to each of its two neighbors (on a circle), 20 shared evenly by the
    others, divided by their sum, which is less than 100 where there are no others.
    """
    if classes == len(FEDMATCH_CLASS_PROBABILITIES):
        return np.array(FEDMATCH_CLASS_PROBABILITIES)
    weights = np.zeros(classes)
    weights[2:-1] = 20 / max(1, classes - 3)
    for place, weight in ((0, 50), (1, 15), (-1, 15)):
        weights[place % classes] += weight
    return weights / weights.sum()


def fit_counts(logs: np.ndarray, size: int, pools: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return whole counts (clients, classes) near exp(logs), with rows of `size` and columns within `pools`.

    The table of mixes exp(logs), whose scale is free in each row, is fitted by iterative proportional fitting (Deming
    and Stephan 1940) to rows of `size` and columns in proportion to `pools` (classes,), the nearest such table
    in relative entropy; in logarithms, because a mix of a small alpha underflows. Then it is rounded, clients in
    random order, what a class is owed carried from one to the next.
    """
    with np.errstate(divide="ignore"):  # an empty pool: minus infinity, no share
        target = np.log(pools * (size * len(logs) / pools.sum()))
    scale = np.where(pools > 0, 0.0, -np.inf)
    exact = np.zeros(logs.shape)
    for _ in range(_MAX_FITTING_STEPS):
        exact = size * _softmax(logs + scale)
        columns = exact.sum(0)
        if np.abs(columns - np.exp(target)).max() < 0.1:
            break
        # A class that nobody wants at all would need an infinite step.
        scale = scale + target - np.log(np.maximum(columns, 1e-100))
    return _round_counts(exact, pools, draw)


def _round_counts(exact: np.ndarray, pools: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Round a table (clients, classes) whose rows sum to whole numbers; keep these, and the columns within `pools`."""
    counts = np.zeros(exact.shape, np.int64)
    left = pools.copy()
    owed = np.zeros(exact.shape[1])
    sizes = np.round(exact.sum(1)).astype(np.int64)
    for k in draw.permutation(len(exact)):
        amounts = np.minimum(np.floor(exact[k]).astype(np.int64), left)
        rest = exact[k] - amounts
        while (short := int(sizes[k] - amounts.sum())) > 0:
            # First the classes of which the client has a fraction to round up, those that are owed most before others.
            urgency = np.where(rest > _MIN_FRACTION, owed + rest, -len(exact) + owed)
            open_ = np.flatnonzero(amounts < left)
            amounts[open_[np.argsort(-urgency[open_], kind="stable")[:short]]] += 1
            rest = exact[k] - amounts
        owed += rest
        left -= amounts
        counts[k] = amounts
    return counts


def _assign_fitted(part: RowPool, logs: np.ndarray) -> np.ndarray:
    pools, rows = _shuffle_by_class(part), len(part.labels)
    counts = fit_counts(logs, rows // part.clients, np.array([len(pool) for pool in pools]), part.draw)
    return _assign_counts(counts, pools, rows)


def _shuffle_by_class(part: RowPool) -> list[np.ndarray]:
    """Return the rows of each class in random order."""
    return [part.draw.permutation(np.flatnonzero(part.labels == label)) for label in range(len(part.names))]


def _assign_counts(counts: np.ndarray, pools: list[np.ndarray], rows: int) -> np.ndarray:
    """Return the holder of each row: clients take counts (clients, classes) from the front of the pools in turn."""
    holder = np.full(rows, -1, np.int64)
    for column, pool in zip(counts.T, pools, strict=True):
        holder[pool[: column.sum()]] = np.repeat(np.arange(len(counts)), column)
    return holder


def _log_dirichlet(dirichlet_alpha: float, shape: tuple[int, int], draw: np.random.Generator) -> np.ndarray:
    """Return the logarithms of Dirichlet(alpha) rows, each up to a constant.

    log G(a) = log G(a + 1) + log(U) / a for gamma variates (Marsaglia and Tsang 2000, section 6).
    """
    dirichlet_alpha = max(dirichlet_alpha, 1e-9)  # one class holds all of a mix long before; the division stays finite
    boost = np.log1p(-draw.random(shape)) / dirichlet_alpha  # 1 - U is never 0
    return np.log(draw.standard_gamma(dirichlet_alpha + 1, shape)) + boost


def _softmax(logs: np.ndarray) -> np.ndarray:
    shares = np.exp(logs - logs.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def drop_unlabeled(client: np.ndarray, labeled: np.ndarray, share: float, draw: np.random.Generator) -> np.ndarray:
    """Return the holders int64 (N,), of every client's unlabeled rows only `share`, at least one; the rest nobody's.

    Of two shares the smaller one's rows are among the larger one's.
    """
    left = client.copy()
    order = draw.permutation(len(client))
    for k in np.unique(client[client >= 0]):
        mine = order[(client[order] == k) & ~labeled[order]]
        left[mine[max(1, round(share * len(mine))) :]] = -1
    return left
