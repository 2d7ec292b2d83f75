"""Partition rules of SemiFL, FedDB, FedLoKe, FedMatch and SAGE: assign rows to clients.

Every rule returns the client of each row of a `RowPool`, int64 (N,); -1 for a row that no client gets. Docstrings state
differences from the authors' code.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.core.split_options import SplitOptions
from halfmoon.data.partition.primitives import apportion, spread_by_dirichlet

FEDMATCH_CLASS_PROBABILITIES = (0.50, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15)
"""FedMatch's class probabilities of a client of type 0. Type t has them shifted by t classes."""

_MAX_FITTING_STEPS = 2000
"""Iterations of proportional fitting."""

_MIN_FRACTION = 1e-3
"""Smallest fraction of a row that gives a client a claim to one more row of a class."""


class RowPool(NamedTuple):
    """The rows that a rule divides among clients.

    Attributes:
        labels: The label of each row, int (N,).
        names: The class names, by label.
        clients: The number of clients.
        generator: The generator of all random draws.
        kind: The kind of rows in error messages: "labeled", "unlabeled" or "shared" (both).
    """

    labels: np.ndarray
    names: Sequence[str]
    clients: int
    generator: np.random.Generator
    kind: str

    def check(self, min_rows: int = 1) -> None:
        """Raise UserError if there are fewer than `min_rows` rows for each client."""
        rows = len(self.labels)
        required = min_rows * self.clients
        if required > rows:
            raise UserError(
                f"{self.clients} clients with at least {min_rows} {self.kind} images each need {required}, but "
                f"there are {rows}; ask for fewer clients, a smaller min_size or another share of labels."
            )


def assign_equal_sizes(options: SplitOptions, row_pool: RowPool) -> np.ndarray:
    """Give floor(rows / clients) random rows to each client, and the remainder to no client (SemiFL, NeurIPS 2022, IID).

    Classes are not balanced inside a client, as in the authors' code.

    Args:
        options: Unused; every partition rule has the same arguments.
        row_pool: The rows, their labels, the number of clients and the random generator.

    Returns:
        The client of each row, int64 (N,), -1 for none.
    """
    row_pool.check()  # at least one row for each client
    rows = len(row_pool.labels)
    size = rows // row_pool.clients
    assigned_rows = row_pool.generator.permutation(rows)[: size * row_pool.clients]
    client_of_row = np.full(rows, -1, np.int64)
    client_of_row[assigned_rows] = np.repeat(np.arange(row_pool.clients), size)
    return client_of_row


def assign_shards(options: SplitOptions, row_pool: RowPool) -> np.ndarray:
    """Give each client `classes_per_client` random shards of one class each (SemiFL, NeurIPS 2022, "K classes").

    A class, in the order of the rows, is cut into clients * classes_per_client / classes contiguous shards; rows left
    over are added, one each, to its first shards. A client may draw two shards of a class, and then has fewer classes.

    Args:
        options: The options of the split, with `classes_per_client`.
        row_pool: The rows, their labels, the number of clients and the random generator.

    Returns:
        The client of each row, int64 (N,).

    Raises:
        UserError: If the number of shards of a class is not an integer, or exceeds its rows.
    """
    labels = row_pool.labels
    names = row_pool.names
    clients = row_pool.clients
    generator = row_pool.generator
    per_client = options.classes_per_client
    classes = len(names)
    shards, remainder = divmod(clients * per_client, classes)
    if remainder:
        # The shards are divisible by the classes if the number of clients is a multiple of this step.
        step = classes // math.gcd(classes, per_client)
        raise UserError(
            f"{clients} clients with {per_client} shards each make {clients * per_client} shards, which {classes} "
            f"classes cannot supply evenly; choose clients as a multiple of {step}, or another classes_per_client."
        )
    order = generator.permutation(classes * shards)
    client_of_row = np.empty(len(labels), np.int64)
    for label, name in enumerate(names):
        rows = np.flatnonzero(labels == label)
        if len(rows) < shards:
            raise UserError(
                f"class {name} has {len(rows)} {row_pool.kind} images to share, fewer than its {shards} shards; ask for fewer "
                "clients, a smaller classes_per_client or another number of labels."
            )
        # Client k gets the shards at positions k * per_client to (k + 1) * per_client - 1 of the permutation.
        shard_clients = order[label * shards : (label + 1) * shards] // per_client
        has_extra_row = np.arange(shards) < len(rows) % shards
        sizes = len(rows) // shards + has_extra_row
        client_of_row[rows] = np.repeat(shard_clients, sizes)
    return client_of_row


def assign_sequentially(options: SplitOptions, row_pool: RowPool) -> np.ndarray:
    """Fill clients one after another with floor(N / clients) rows from class pools (FedLoKe, CIKM 2023, authors' code).

    A class pool is the rows of a class in random order. For each client: draw q ~ Dirichlet(alpha) over the classes and
    take round(q * size) rows of each class; the rounding error is added to the largest. Rows that an exhausted class
    lacks are taken from the lowest class that has any, so that the mixes of late clients are not Dirichlet draws. The
    last client gets the remaining rows, up to `size`.

    Args:
        options: The options of the split, with `dirichlet_alpha`.
        row_pool: The rows, their labels, the number of clients and the random generator.

    Returns:
        The client of each row, int64 (N,), -1 for none.
    """
    row_pool.check()
    labels = row_pool.labels
    clients = row_pool.clients
    generator = row_pool.generator
    pools = _shuffle_by_class(row_pool)
    remaining = np.array([len(pool) for pool in pools])
    size = len(labels) // clients
    counts = np.zeros((clients, len(pools)), np.int64)
    for client in range(clients - 1):
        shares = generator.dirichlet(np.full(len(pools), options.dirichlet_alpha))
        quota = np.round(shares * size).astype(np.int64)
        quota[shares.argmax()] += size - quota.sum()
        if quota.min() < 0:
            # A few rows over many classes can round up to more than the largest class can take back.
            quota = apportion(shares, size).astype(np.int64)
        supplied = np.minimum(quota, remaining)
        # Replace missing rows by rows of the lowest classes that have any left. The cumulative sum, capped at the number
        # of missing rows, is what classes 0 to c supply together, so its differences are what each class supplies.
        spare_rows = np.cumsum(remaining - supplied)
        replacements = np.diff(np.minimum(spare_rows, size - supplied.sum()), prepend=0)
        counts[client] = supplied + replacements
        remaining -= counts[client]
    counts[-1] = remaining
    client_of_row = _assign_counts(counts, pools, len(labels))
    # Drop random rows of the last client, which has more than `size` if clients do not divide the rows.
    last_rows = generator.permutation(np.flatnonzero(client_of_row == clients - 1))
    client_of_row[last_rows[size:]] = -1
    return client_of_row


def assign_jointly(options: SplitOptions, row_pool: RowPool) -> np.ndarray:
    """Give each client floor(N / clients) rows, with Dirichlet(alpha) mixes fitted jointly to the class pools.

    Unlike `assign_sequentially`, the result does not depend on the order of the clients: all mixes are drawn first, and then
    changed as little as the pools require (`fit_counts`). Fewer than `clients` rows remain without a client.
    """
    row_pool.check()
    shape = (row_pool.clients, len(row_pool.names))
    log_mixes = _log_dirichlet(options.dirichlet_alpha, shape, row_pool.generator)
    return _assign_fitted(row_pool, log_mixes)


def assign_paired_blocks(options: SplitOptions, row_pool: RowPool, min_size: int, tries: int) -> np.ndarray:
    """Cut the rows into random blocks of equal size, each divided by Dirichlet(alpha) between two clients (SAGE, CVPR 2025).

    Inside a block each class is divided by `primitives.spread_by_dirichlet`, with its cap. Then both clients get the same
    size: the larger one gives its surplus, rows of its highest classes, to the other. Alpha therefore has little effect:
    on CIFAR-10 with 20 clients the effective number of classes of a client (the exponential of its class entropy) is
    5.9, 7.2 and 7.9 at alpha 0.1, 0.5 and 1, compared with 2.6, 5.5 and 7.0 for an ordinary Dirichlet partition. If the
    number of clients is odd, the last one gets half a block, undivided.

    Args:
        options: The options of the split, with `dirichlet_alpha`.
        row_pool: The rows, their labels, the number of clients and the random generator.
        min_size: The fewest rows of a client in a Dirichlet draw.
        tries: The number of draws before an error about `min_size`.

    Returns:
        The client of each row, int64 (N,); -1 for rows beyond clients * floor(N / clients).
    """
    row_pool.check(max(1, min_size))
    labels = row_pool.labels
    clients = row_pool.clients
    generator = row_pool.generator
    size = len(labels) // clients
    client_of_row = np.full(len(labels), -1, np.int64)
    shuffled_rows = generator.permutation(len(labels))
    # Half a block for the last client of an odd number; an empty slice if the number is even.
    client_of_row[shuffled_rows[2 * size * (clients // 2) : size * clients]] = clients - 1
    for block in range(clients // 2):
        rows = shuffled_rows[2 * size * block : 2 * size * (block + 1)]
        # 0 or 1 for each row of the block: the first or the second of its two clients.
        member = spread_by_dirichlet(
            labels[rows],
            clients=2,
            dirichlet_alpha=options.dirichlet_alpha,
            generator=generator,
            min_size=min_size,
            tries=tries,
            row_kind=f"{row_pool.kind} images",
        )
        larger = int(member.mean() > 0.5)  # the client of the two that has more rows
        larger_rows = np.flatnonzero(member == larger)
        # Sorted by class: the client retains `size` rows of the lowest classes.
        surplus = larger_rows[np.argsort(labels[rows][larger_rows], kind="stable")][size:]
        member[surplus] = 1 - larger
        client_of_row[rows] = 2 * block + member
    return client_of_row


def assign_equal_classes(options: SplitOptions, row_pool: RowPool) -> np.ndarray:
    """Give every client the same number of rows of every class (FedMatch, ICLR 2021, batch IID).

    The smallest class determines this number.

    Args:
        options: Unused; every partition rule has the same arguments.
        row_pool: The rows, their labels, the number of clients and the random generator.

    Returns:
        The client of each row, int64 (N,); -1 for the surplus rows of larger classes.

    Raises:
        UserError: If a class has fewer rows than there are clients.
    """
    totals = np.bincount(row_pool.labels, minlength=len(row_pool.names))
    rows_per_class = int(totals.min()) // row_pool.clients
    if not rows_per_class:
        raise UserError(
            f"class {row_pool.names[int(totals.argmin())]} has {totals.min()} {row_pool.kind} images to share, fewer than one "
            f"for each of {row_pool.clients} clients; ask for fewer clients or another number of labels, or choose setting "
            "iid-iid."
        )
    counts = np.full((row_pool.clients, len(totals)), rows_per_class)
    return _assign_counts(counts, pools=_shuffle_by_class(row_pool), rows=len(row_pool.labels))


def assign_peaked_classes(options: SplitOptions, row_pool: RowPool) -> np.ndarray:
    """Give client k floor(N / clients) rows with half of them from class k mod classes (FedMatch, batch non-IID).

    The other half is of the other classes, by `fedmatch_class_probabilities`. Counts are the expected ones, fitted to
    the available rows of each class if these are uneven, whereas the authors' code takes rows class by class until a
    class is exhausted. Fewer than `clients` rows remain without a client.

    Args:
        options: Unused; every partition rule has the same arguments.
        row_pool: The rows, their labels, the number of clients and the random generator.

    Returns:
        The client of each row, int64 (N,), -1 for none.
    """
    row_pool.check()  # enough rows for all clients
    classes = len(row_pool.names)
    types = np.arange(row_pool.clients) % classes
    # The class mix of a client of type t is that of type 0, shifted by t classes.
    shifted_classes = (np.arange(classes) - types[:, None]) % classes
    mixes = fedmatch_class_probabilities(classes)[shifted_classes]
    return _assign_fitted(row_pool, log_mixes=np.log(mixes))


def fedmatch_class_probabilities(classes: int) -> np.ndarray:
    """Return the class probabilities of a client of type 0, (classes,): `FEDMATCH_CLASS_PROBABILITIES` for ten classes.

    For another number of classes: weight 50 for class 0, 15 for each of its two neighbors on a circle, and 20 divided
    evenly among the remaining classes. The weights are normalized, because few classes have no remaining ones.
    """
    if classes == len(FEDMATCH_CLASS_PROBABILITIES):
        return np.array(FEDMATCH_CLASS_PROBABILITIES)
    weights = np.zeros(classes)
    weights[2:-1] = 20 / max(1, classes - 3)
    for offset, weight in ((0, 50), (1, 15), (-1, 15)):
        weights[offset % classes] += weight
    return weights / weights.sum()


def fit_counts(log_mixes: np.ndarray, size: int, pool_sizes: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Compute how many rows of each class each client gets: counts close to given mixes that the classes can supply.

    Iterative proportional fitting (Deming and Stephan 1940) finds the table closest to the mixes in relative entropy
    whose rows sum to `size` and whose columns are proportional to `pool_sizes`. It works on logarithms, because the mixes of a
    small Dirichlet concentration underflow. The table is then rounded, one client after another in random order; the
    rounding error of a class is carried over to the next client.

    Args:
        log_mixes: The logarithms of the clients' mixes (shares of classes), (clients, classes), each row up to a
            constant.
        size: The number of rows of each client.
        pool_sizes: The number of rows of each class, (classes,).
        generator: The generator for the order of the clients.

    Returns:
        int64 (clients, classes), with row sums `size` and column sums of at most `pool_sizes`.
    """
    with np.errstate(divide="ignore"):  # an empty pool gives minus infinity, a share of 0
        log_target = np.log(pool_sizes * (size * len(log_mixes) / pool_sizes.sum()))
    log_scale = np.where(pool_sizes > 0, 0.0, -np.inf)
    exact = np.zeros(log_mixes.shape)
    # The softmax scales the rows exactly; `log_scale` moves the columns until they are off by less than a tenth of a
    # row.
    for _ in range(_MAX_FITTING_STEPS):
        exact = size * _softmax(log_mixes + log_scale)
        class_totals = exact.sum(0)
        if np.abs(class_totals - np.exp(log_target)).max() < 0.1:
            break
        # Multiply each column by its target divided by its total. The maximum avoids an infinite factor for a class of
        # which all clients have a share of 0.
        log_scale = log_scale + log_target - np.log(np.maximum(class_totals, 1e-100))
    return _round_counts(exact, pool_sizes, generator)


def _round_counts(exact: np.ndarray, pool_sizes: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Round a table of expected counts to integers, so that no class has more rows than its pool.

    One client after another is rounded down, in random order. Its missing rows are from the classes for which rounding
    has removed most so far, over all earlier clients, so that the totals of classes remain close to the expected ones.

    Args:
        exact: The expected counts, float (clients, classes). They sum to at most the rows of the pools, so that there
            are always classes with rows left for a client's missing rows.
        pool_sizes: The number of rows of each class, int64 (classes,).
        generator: The generator for the order of the clients.

    Returns:
        int64 (clients, classes), with the row sums of `exact`, and column sums of at most `pool_sizes`.
    """
    counts = np.zeros(exact.shape, np.int64)
    remaining = pool_sizes.copy()
    carried_error = np.zeros(exact.shape[1])  # expected minus assigned rows of earlier clients, by class
    sizes = np.round(exact.sum(1)).astype(np.int64)
    demotion = len(exact)  # the number of clients, which is more than any error
    for client in generator.permutation(len(exact)):
        amounts = np.minimum(np.floor(exact[client]).astype(np.int64), remaining)
        fraction = exact[client] - amounts
        # A pass adds at most one row of each class, so more passes are needed if few classes have rows left.
        while (missing := int(sizes[client] - amounts.sum())) > 0:
            # First the classes of which the client has a fraction of a row, and among them those of the largest error.
            # The demotion puts all other classes behind them.
            has_fraction = fraction > _MIN_FRACTION
            priority = np.where(has_fraction, carried_error + fraction, carried_error - demotion)
            available = np.flatnonzero(amounts < remaining)
            by_priority = available[np.argsort(-priority[available], kind="stable")]
            amounts[by_priority[:missing]] += 1
            fraction = exact[client] - amounts
        carried_error += fraction
        remaining -= amounts
        counts[client] = amounts
    return counts


def _assign_fitted(row_pool: RowPool, log_mixes: np.ndarray) -> np.ndarray:
    """Assign equally many random rows to each client, with counts of classes close to the client's mix (`fit_counts`).

    Args:
        row_pool: The rows and their labels.
        log_mixes: The logarithms of the clients' mixes (shares of classes), (clients, classes).

    Returns:
        The client of each row, int64 (N,); -1 for a row that remains.
    """
    pools = _shuffle_by_class(row_pool)
    rows = len(row_pool.labels)
    counts = fit_counts(
        log_mixes,
        size=rows // row_pool.clients,
        pool_sizes=np.array([len(pool) for pool in pools]),
        generator=row_pool.generator,
    )
    return _assign_counts(counts, pools, rows)


def _shuffle_by_class(row_pool: RowPool) -> list[np.ndarray]:
    """Shuffle the rows of each class: a list of int64 arrays, by label."""
    return [
        row_pool.generator.permutation(np.flatnonzero(row_pool.labels == label)) for label in range(len(row_pool.names))
    ]


def _assign_counts(counts: np.ndarray, pools: list[np.ndarray], rows: int) -> np.ndarray:
    """Assign rows from the front of each class pool to clients 0, 1, ...: counts (clients, classes), -1 for the rest."""
    client_of_row = np.full(rows, -1, np.int64)
    for class_counts, pool in zip(counts.T, pools, strict=True):
        client_of_row[pool[: class_counts.sum()]] = np.repeat(np.arange(len(counts)), class_counts)
    return client_of_row


def _log_dirichlet(dirichlet_alpha: float, shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """Draw logarithms of Dirichlet(alpha) rows, each up to an additive constant.

    A Dirichlet row is a normalized row of gamma variates G(alpha). For a small alpha these underflow, so they are drawn
    as logarithms: log G(a) = log G(a + 1) + log(U) / a (Marsaglia and Tsang 2000, section 6).
    """
    # Keep the division finite. At much larger alphas than this minimum, a mix is a single class already.
    dirichlet_alpha = max(dirichlet_alpha, 1e-9)
    # log(1 - U) instead of log(U), because U can be 0 but never 1.
    boost = np.log1p(-generator.random(shape)) / dirichlet_alpha
    return np.log(generator.standard_gamma(dirichlet_alpha + 1, shape)) + boost


def _softmax(logs: np.ndarray) -> np.ndarray:
    shares = np.exp(logs - logs.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def reduce_unlabeled(
    client: np.ndarray, labeled: np.ndarray, share: float, generator: np.random.Generator
) -> np.ndarray:
    """Reduce each client's unlabeled rows to a random share, at least one row; the rows of a smaller share are a subset.

    It serves to measure how accuracy depends on the amount of unlabeled data.

    Args:
        client: The client of each row, int64 (N,).
        labeled: The labeled rows, bool (N,).
        share: The share of unlabeled rows to retain.
        generator: The generator of the order in which rows are dropped.

    Returns:
        The client of each row, int64 (N,), with -1 for dropped rows.
    """
    reduced = client.copy()
    order = generator.permutation(len(client))
    for client_number in np.unique(client[client >= 0]):
        unlabeled_rows = order[(client[order] == client_number) & ~labeled[order]]
        retained = max(1, round(share * len(unlabeled_rows)))
        reduced[unlabeled_rows[retained:]] = -1
    return reduced


def replace_by_unknown(
    client: np.ndarray, labeled: np.ndarray, is_unknown: np.ndarray, share: float, generator: np.random.Generator
) -> np.ndarray:
    """Replace a share of each client's unlabeled rows by random rows of unknown classes; at least one row remains.

    It simulates an open set: unlabeled images that are of none of the classes to be learned.

    Args:
        client: The client of each row, int64 (N,), -1 for rows of unknown classes.
        labeled: The labeled rows, bool (N,).
        is_unknown: The rows of unknown classes, bool (N,).
        share: The share of unlabeled rows to replace.
        generator: The generator of the orders of both kinds of rows.

    Returns:
        The client of each row, int64 (N,), with -1 for replaced rows and for rows of unknown classes that are not needed.

    Raises:
        UserError: If there are too few rows of unknown classes.
    """
    reduced = reduce_unlabeled(client, labeled, 1 - share, generator)
    removed_from = client[(client >= 0) & (reduced < 0)]  # the client of each removed row
    unknown_rows = generator.permutation(np.flatnonzero(is_unknown))
    if len(removed_from) > len(unknown_rows):
        raise UserError(
            f"unknown_share {share:g} needs {len(removed_from):,} images of the unknown classes, which have "
            f"{len(unknown_rows):,}; choose a smaller share, or more unknown_classes."
        )
    reduced[unknown_rows[: len(removed_from)]] = removed_from
    return reduced
