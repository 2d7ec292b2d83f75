"""Building blocks of partitions: apportionment, even and Dirichlet assignment of rows, grouped hold-out.

The rules are those of FedMatch and FedDure (AAAI 2024). A Dirichlet distribution over clients for each class, its cap
and its smallest size are from Yurochkin et al. 2019. Every draw comes from an explicit generator.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from halfmoon.core.errors import UserError


def named_generator(seed: int, *path: str) -> np.random.Generator:
    """Create the PCG64 generator of a seed and a stream name; different names give independent streams."""
    digest = hashlib.sha256("\0".join((str(seed), *path)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


class GroupHoldout:
    """Hold out rows so that no group, such as a patient, has rows on both sides, over several draws.

    Attributes:
        by_group: True for groups that are held out, False for groups that are not.
    """

    def __init__(self) -> None:
        self.by_group: dict[str, bool] = {}

    def draw(self, order: np.ndarray, groups: Sequence[str], count: int) -> np.ndarray:
        """Select rows to hold out: the first ones of `order`, each with all rows of its group in `order`.

        One call selects rows of one class. A group with several classes occurs in several calls, and remains on the
        side to which the first of them has assigned it.

        Args:
            order: Row numbers of a class in random order.
            groups: The group of every row of the data set; "" for a row without a group.
            count: The approximate number of rows to hold out.

        Returns:
            The held-out rows, int64.
        """
        rows: list[int] = order.tolist()
        selection = [row for row in rows if self.by_group.get(groups[row], False)]
        rows_of_group: dict[str, list[int]] = {}
        for row in rows:
            rows_of_group.setdefault(groups[row], []).append(row)
        for row in rows:
            group = groups[row]
            if group in self.by_group:
                continue
            members = rows_of_group[group] if group else [row]
            # Skip a group that would exceed `count` by more than half of its rows, unless no row is selected yet.
            fits = not selection or len(selection) + len(members) / 2 <= count
            held_out = len(selection) < count and fits
            if held_out:
                selection += members
            if group:
                self.by_group[group] = held_out
        return np.array(selection, np.int64)


def apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """Divide `total` into integers proportional to `weights` (largest remainder method)."""
    exact = weights * total
    amounts = exact // weights.sum()
    remainders = exact % weights.sum()
    by_remainder = np.argsort(-remainders, kind="stable")  # the largest first
    missing = total - int(amounts.sum())
    amounts[by_remainder[:missing]] += 1
    return amounts


def draw_labeled(labels: np.ndarray, counts: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Draw counts[c] random rows of each class c, for example those that keep their labels: a mask, bool (N,)."""
    labeled = np.zeros(len(labels), bool)
    for label, count in enumerate(counts):
        labeled[generator.permutation(np.flatnonzero(labels == label))[:count]] = True
    return labeled


def spread_evenly(labels: np.ndarray, clients: int, generator: np.random.Generator) -> np.ndarray:
    """Assign rows to clients evenly in every class.

    Rows, sorted by class and shuffled inside each class, are dealt to the clients in turn, like cards. Any two clients
    differ by at most one row in every class, and by at most one row in total.

    Args:
        labels: The label of each row, int (N,).
        clients: The number of clients.
        generator: The generator of the order of rows in a class, and of the order of the clients.

    Returns:
        The client of each row, int64 (N,).
    """
    order = np.concatenate([generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)])
    client_of_row = np.empty(len(labels), np.int64)
    client_of_row[order] = generator.permutation(clients)[np.arange(len(labels)) % clients]
    return client_of_row


def rows_by_client(client: np.ndarray, clients: int) -> list[np.ndarray]:
    """List the rows of each client.

    Args:
        client: The client of each row, (N,); negative for rows without a client.
        clients: The number of clients.

    Returns:
        For each client the numbers of its rows, int64, ascending.
    """
    # One sort for all clients; a search for each client would cost clients * N.
    order = np.argsort(client, kind="stable")
    boundaries = np.searchsorted(client[order], np.arange(clients + 1))
    # The first section has the rows without a client.
    return np.split(order, boundaries)[1 : clients + 1]


MAX_SHORT_CLIENTS = 12
"""Number of clients below the smallest size, in each of three draws, from which further draws are pointless: a draw
without such clients then has a probability of about e^-12, one in 160,000."""


def spread_by_dirichlet(
    labels: np.ndarray,
    clients: int,
    dirichlet_alpha: float,
    generator: np.random.Generator,
    *,
    min_size: int,
    cap: bool = True,
    tries: int = 100,
    row_kind: str = "rows",
) -> np.ndarray:
    """Partition each class among clients by Dirichlet(alpha); return the client of each row, int64 (N,).

    For each class: draw shares p ~ Dir(alpha); with `cap`, clients that already have N / clients rows get a share of 0;
    normalize p and cut the class at floor(cumsum(p) * rows). The last client gets the remainder.

    Args:
        labels: The label of each row, int (N,).
        clients: The number of clients.
        dirichlet_alpha: The concentration; smaller is more uneven.
        generator: The generator.
        min_size: The fewest rows of a client. All classes are redrawn until each client has as many.
        cap: True to give no further class to clients with an even share.
        tries: The largest number of draws; three, if `MAX_SHORT_CLIENTS` or more clients are too small in each.
        row_kind: What error messages call the rows, such as "labeled images".

    Raises:
        UserError: If no draw gives each client `min_size` rows; the message suggests values that would succeed.
    """
    best_minimum = -1
    fewest_short = clients
    number = 0
    for number in range(1, tries + 1):
        client_of_row = _spread_once(labels, clients, dirichlet_alpha, generator, cap)
        sizes = np.bincount(client_of_row, minlength=clients)
        short = int((sizes < min_size).sum())
        if not short:
            return client_of_row
        best_minimum = max(best_minimum, int(sizes.min()))
        fewest_short = min(fewest_short, short)
        if number >= 3 and fewest_short >= MAX_SHORT_CLIENTS:
            break
    suggestions = _suggest_changes(labels, clients, dirichlet_alpha, min_size, cap)
    if best_minimum > 0:
        suggestions.append(f"set min_size to {best_minimum} or less")
    raise UserError(
        f"in {number} draws no split with dirichlet_alpha {dirichlet_alpha:g} gave each of {clients} clients "
        f"{min_size} {row_kind}; the best minimum was {best_minimum}, and {fewest_short} or more had fewer. "
        f"{_join_suggestions(suggestions)}."
    )


def _suggest_changes(labels: np.ndarray, clients: int, dirichlet_alpha: float, min_size: int, cap: bool) -> list[str]:
    """Suggest a larger alpha and a smaller number of clients, for an error message.

    Each is the value closest to the user's, in steps of a factor 2, for which one of three trial draws gives every client
    at least `min_size` rows. A value that is not found is not suggested.

    Args:
        labels: The label of each row, int (N,).
        clients: The number of clients for which no draw succeeded.
        dirichlet_alpha: The concentration for which no draw succeeded.
        min_size: The fewest rows of a client.
        cap: True to give no further class to clients with an even share of the rows.
    """

    def succeeds(candidate_clients: int, candidate_alpha: float) -> bool:
        """Check whether one of three trial draws gives every client enough rows."""
        # A separate generator: trial draws must not depend on the seed of the run.
        generator = named_generator(0, "what would")  # the name of the stream; do not change, it selects the numbers
        for _ in range(3):
            client_of_row = _spread_once(labels, candidate_clients, candidate_alpha, generator, cap)
            if int(np.bincount(client_of_row, minlength=candidate_clients).min()) >= min_size:
                return True
        return False

    larger_alphas = (dirichlet_alpha * 2**doublings for doublings in range(1, 8))
    fewer_clients = (clients // 2**halvings for halvings in range(1, clients.bit_length() - 1))
    sufficient_alpha = next((alpha for alpha in larger_alphas if succeeds(clients, alpha)), None)
    sufficient_clients = next((count for count in fewer_clients if succeeds(count, dirichlet_alpha)), None)
    suggestions = []
    if sufficient_alpha is not None:
        suggestions.append(f"raise dirichlet_alpha to {sufficient_alpha:g}")
    if sufficient_clients is not None:
        suggestions.append(f"ask for {sufficient_clients} clients")
    return suggestions


def _join_suggestions(suggestions: list[str]) -> str:
    """Join suggestions to the beginning of a sentence: "Raise ..., ask for ..., or set ..."."""
    *all_but_last, last = suggestions or ["ask for fewer clients"]
    text = f"{', '.join(all_but_last)}, or {last}" if all_but_last else last
    return text[0].upper() + text[1:]


def _spread_once(
    labels: np.ndarray, clients: int, dirichlet_alpha: float, generator: np.random.Generator, cap: bool
) -> np.ndarray:
    """Partition each class among clients by one Dirichlet draw; some clients may get few rows or none.

    Args:
        labels: The label of each row, int (N,).
        clients: The number of clients.
        dirichlet_alpha: The concentration; smaller is more uneven.
        generator: The generator.
        cap: True to give no further class to clients with an even share of the rows.

    Returns:
        The client of each row, int64 (N,).
    """
    client_of_row = np.empty(len(labels), np.int64)
    sizes = np.zeros(clients, np.int64)
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(clients, dirichlet_alpha))
        # In integers: size < N / clients. While rows remain, at least one client is below its even share.
        below_cap = (sizes * clients < len(labels)) if cap else np.ones(clients, bool)
        shares = np.where(below_cap, shares, 0.0)
        total = shares.sum()
        if total > 0:
            shares = shares / total
        else:
            # With a small alpha, the shares of all clients below the cap can underflow to 0. The normalized shares of a
            # subset of clients have a Dirichlet distribution too, so drawing for the subset is the same rule.
            shares = np.zeros(clients)
            shares[below_cap] = generator.dirichlet(np.full(int(below_cap.sum()), dirichlet_alpha))
        # Rounding can make the sum of the shares exceed 1: the minimum keeps the cuts inside the class.
        cuts = np.minimum((np.cumsum(shares)[:-1] * len(rows)).astype(np.int64), len(rows))
        counts = np.diff(np.concatenate(([0], cuts, [len(rows)])))
        client_of_row[rows] = np.repeat(np.arange(clients), counts)
        sizes += counts
    return client_of_row
