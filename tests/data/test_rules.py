"""The rules of SemiFL, FedLoKe and FedMatch: sizes by hand, an oracle in words, and what no rule may break."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_partition import mixed

from halfmoon.core.errors import UserError
from halfmoon.core.split_options import SplitOptions
from halfmoon.data.partition import rules
from halfmoon.data.partition.primitives import named_generator
from halfmoon.data.partition.rules import RowPool

CIFAR = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))

Fill = Callable[[SplitOptions, RowPool], np.ndarray]


def table(holder: np.ndarray, labels: np.ndarray, clients: int, classes: int) -> np.ndarray:
    held = holder >= 0
    cells = np.bincount(holder[held] * classes + labels[held], minlength=clients * classes)
    return cells.reshape(clients, classes)


def make_pool(labels: np.ndarray, classes: int, clients: int, seed: int = 0) -> RowPool:
    """Return rows to share out; the classes are called a, b, c ..."""
    return RowPool(
        labels, [chr(97 + label) for label in range(classes)], clients, named_generator(seed, "x"), "labeled"
    )


def alpha(value: float) -> SplitOptions:
    return SplitOptions(dirichlet_alpha=value)


@given(st.integers(20, 200), st.integers(1, 20), st.integers(0, 99))
def test_equal_sizes_drop_the_remainder(rows: int, clients: int, seed: int) -> None:
    holder = rules.assign_equal_sizes(SplitOptions(), make_pool(np.zeros(rows, np.int64), 1, clients, seed))
    assert np.bincount(holder + 1, minlength=clients + 1).tolist() == [rows % clients] + [rows // clients] * clients


def test_equal_sizes_are_not_balanced_by_class() -> None:
    """460 random rows of 10 classes: a class count has a standard deviation of sqrt(460 * 0.1 * 0.9) = 6.4."""
    labels = CIFAR[:46_000]
    counts = table(rules.assign_equal_sizes(SplitOptions(), make_pool(labels, 10, 100)), labels, 100, 10)
    assert 5.5 < (counts - 46).std() < 7.3


def test_shards_are_contiguous_and_their_leftovers_come_first() -> None:
    """Two classes, 4 clients with 2 shards: 4 shards a class. 11 rows are cut into 3, 3, 3, 2, 8 into 2, 2, 2, 2."""
    labels = np.array([0] * 5 + [1] * 4 + [0] * 6 + [1] * 4)
    holder = rules.assign_shards(SplitOptions(), make_pool(labels, 2, 4))
    for label, sizes in ((0, (3, 3, 3, 2)), (1, (2, 2, 2, 2))):
        of_class = holder[labels == label]
        for shard in np.split(of_class, np.cumsum(sizes)[:-1]):
            assert len(set(shard.tolist())) == 1
    assert set(np.bincount(holder)) <= {4, 5, 6}


def test_classes_are_drawn_as_often_as_in_the_multiset() -> None:
    """CIFAR-10 with 4,000 labels: 20 shards of 230 rows a class, so every client has 460 rows. A client's second
    shard is one of 199, 19 of them of the class of its first: 9.55 %. Of 6,000 clients 573 +- 23."""
    labels = mixed(46_000, 10)
    doubles = 0
    for seed in range(60):
        counts = table(rules.assign_shards(SplitOptions(), make_pool(labels, 10, 100, seed)), labels, 100, 10)
        assert set(np.unique(counts)) <= {0, 230, 460}
        assert (counts.sum(1) == 460).all()
        doubles += int((counts == 460).sum())
    assert 500 < doubles < 646


def test_shards_that_do_not_come_out_even_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"7 clients with 2 shards each make 14 shards, which 10 classes cannot .* of 5,"
    ):
        rules.assign_shards(SplitOptions(), make_pool(mixed(500, 10), 10, 7))
    rules.assign_shards(SplitOptions(), make_pool(mixed(500, 10), 10, 15))
    with pytest.raises(UserError, match="class b has 3 labeled images to share, fewer than its 4 shards"):
        rules.assign_shards(SplitOptions(), make_pool(np.array([0] * 9 + [1] * 3), 2, 4))


def in_words(labels, classes, clients, dirichlet_alpha, draw):
    """FedLoKe's split as section 1.3 of the notes says it, a row at a time: rows, rest, top-ups of each client."""
    pools = [draw.permutation([r for r in range(len(labels)) if labels[r] == c]).tolist() for c in range(classes)]
    size = len(labels) // clients
    held = []
    extra = []
    for k in range(clients):
        client_rows: list[int] = []
        count = size if k < clients - 1 else len(labels) - size * (clients - 1)
        if k < clients - 1:
            q = draw.dirichlet([dirichlet_alpha] * classes)
            wanted = [round(float(each) * size) for each in q]
            wanted[int(np.argmax(q))] += size - sum(wanted)
            for c in range(classes):
                client_rows += [pools[c].pop(0) for _ in range(min(wanted[c], len(pools[c])))]
        extra.append(count - len(client_rows))
        while len(client_rows) < count:
            lowest = next(c for c in range(classes) if pools[c])
            client_rows.append(pools[lowest].pop(0))
        held.append(client_rows)
    order = draw.permutation(sorted(held[-1])).tolist()
    held[-1] = order[:size]
    return held, order[size:], extra


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("dirichlet_alpha", "clients"), [(0.01, 9), (0.1, 20), (0.5, 23), (50.0, 7)])
def test_filling_in_turn_equals_the_described_algorithm(seed: int, dirichlet_alpha: float, clients: int) -> None:
    labels = mixed(1000, 10, seed)
    holder = rules.assign_sequentially(alpha(dirichlet_alpha), make_pool(labels, 10, clients, seed))
    held, rest, _ = in_words(labels, 10, clients, dirichlet_alpha, named_generator(seed, "x"))
    for k in range(clients):
        assert np.flatnonzero(holder == k).tolist() == sorted(held[k])
    assert np.flatnonzero(holder == -1).tolist() == sorted(rest)
    assert len(rest) == 1000 % clients


@pytest.mark.parametrize(("dirichlet_alpha", "first", "share"), [(0.01, 25, 0.20), (0.1, 31, 0.15), (0.5, 38, 0.07)])
def test_top_ups_begin_where_the_notes_found_them(dirichlet_alpha: float, first: int, share: float) -> None:
    """The notes simulated CIFAR-10 and 50 clients: top-ups begin near client 25, 31, 38 and are 20, 15, 7 % of the
    rows. A tenth of the rows has the same shares."""
    start_time = []
    make_pool = []
    for seed in range(8):
        _, _, extra = in_words(mixed(5000, 10), 10, 50, dirichlet_alpha, named_generator(seed, "x"))
        start_time.append(next(k for k, more in enumerate(extra) if more))
        # The last client draws no mix here; the notes' one asks for what is left of a single class at best.
        make_pool.append(sum(extra[:-1]) / 5000)
    assert abs(np.mean(start_time) - first) < 4
    assert abs(np.mean(make_pool) - share) < 0.03


def test_a_rounding_error_larger_than_the_largest_count() -> None:
    """10 rows over 16 near-even classes are 0.625 each: all round up to 1, and the largest cannot give 6 back. A client
    then takes the 10 largest remainders, at most one row of a class."""
    labels = mixed(160, 16)
    for seed in range(5):
        counts = table(rules.assign_sequentially(alpha(1e5), make_pool(labels, 16, 16, seed)), labels, 16, 16)
        assert (counts.sum(1) == 10).all()
        assert counts[:8].max() == 1


@pytest.mark.parametrize("fill", [rules.assign_sequentially, rules.assign_jointly])
@pytest.mark.parametrize("dirichlet_alpha", [1e-320, 1e-5, 1e9])
def test_gammas_without_bounds(fill: Fill, dirichlet_alpha: float) -> None:
    """Eight classes and eight clients: the first client is of one class, or even."""
    labels = mixed(640, 8)
    counts = table(fill(alpha(dirichlet_alpha), make_pool(labels, 8, 8)), labels, 8, 8)
    assert (counts.sum(1) == 80).all()
    if dirichlet_alpha == 1e9:
        assert (counts == 10).all()
    elif fill is rules.assign_sequentially:
        assert counts[0].max() == 80
    else:
        # Mixes of one class each cannot be met where two clients want the same one; what is left goes round.
        assert counts.max() == 80
        assert (counts.sum(0) == 80).all()


def concentration(fill: Fill, dirichlet_alpha: float) -> tuple[float, float]:
    """Return the mean of sum q^2 over the first and over the last fifth of 50 clients, q a client's class mix."""
    first = []
    last = []
    labels = mixed(5000, 10)
    for seed in range(20):
        shares = table(fill(alpha(dirichlet_alpha), make_pool(labels, 10, 50, seed)), labels, 50, 10) / 100
        squares = np.square(shares).sum(1)
        first.append(squares[:10].mean())
        last.append(squares[-10:].mean())
    return float(np.mean(first)), float(np.mean(last))


def test_late_clients_are_dirichlet_draws_only_where_all_are_fitted_together() -> None:
    """E sum q^2 = (gamma + 1) / (10 gamma + 1) = 0.25 for ten classes at gamma 0.5, with a spread of 0.09 a client,
    0.0064 in a mean of 200. In turn, what is left makes the last clients far more concentrated; together, early and
    late ones agree, and both are near the Dirichlet's own value."""
    first, last = concentration(rules.assign_sequentially, 0.5)
    assert abs(first - 0.25) < 0.02
    assert last - first > 0.05
    first, last = concentration(rules.assign_jointly, 0.5)
    assert abs(first - last) < 0.02
    assert abs((first + last) / 2 - 0.25) < 0.03


def test_a_fit_by_hand() -> None:
    """Mixes (1/2, 1/2) and (1/5, 4/5), 300 rows each, two pools of 300. Fitting retains the cross ratio
    (1/2 * 4/5) / (1/2 * 1/5) = 4, and rows and columns of 300 leave ((x, 300 - x), (300 - x, x)):
    (x / (300 - x))^2 = 4, x = 200. The scale of a row does not count."""
    logs = np.log([[0.5, 0.5], [0.2, 0.8]]) + np.array([[0.0], [-700.0]])
    counts = rules.fit_counts(logs, 300, np.array([300, 300]), named_generator(0, "x"))
    assert counts.tolist() == [[200, 100], [100, 200]]


def test_a_fit_is_the_mixes_themselves_where_the_pools_allow() -> None:
    """Each of four mixes rotates (0.4, 0.3, 0.2, 0.1): columns sum to the pools, so nothing changes.
    Equal mixes take 60, 30, 10 of every 100 rows from pools of 600, 300, 100; 7 clients take 7 tenths of them."""
    shares = np.array([np.roll([0.4, 0.3, 0.2, 0.1], k) for k in range(4)])
    counts = rules.fit_counts(np.log(shares), 50, np.full(4, 50), named_generator(0, "x"))
    assert (counts == np.round(shares * 50)).all()
    counts = rules.fit_counts(np.zeros((7, 3)), 100, np.array([600, 300, 100]), named_generator(0, "x"))
    assert (counts == [60, 30, 10]).all()


def test_a_fit_favors_no_client_in_rounding() -> None:
    """One row each for four clients of mix (2, 1, 1) / 4 and pools of as many rows. Whoever is first takes class 0
    (urgency 1/2), the next two classes 1 and 2 (urgency 1/2 and 3/4 after what is owed), the last class 0: half of the
    clients, and client 0 in half of the draws, 100 +- 7 of 200."""
    pools = np.array([2, 1, 1])
    taken = [rules.fit_counts(np.log([[0.5, 0.25, 0.25]] * 4), 1, pools, named_generator(s, "x")) for s in range(200)]
    assert all(counts.sum(0).tolist() == [2, 1, 1] for counts in taken)
    assert 70 < sum(int(counts[0, 0]) for counts in taken) < 130


@settings(deadline=None)
@given(
    st.sampled_from([rules.assign_sequentially, rules.assign_jointly]),
    st.integers(1, 15),
    st.integers(1, 12),
    st.floats(-4, 4),
    st.integers(0, 10**6),
)
def test_filled_clients_have_one_size_and_share_all_but_a_remainder(
    fill: Fill, clients: int, classes: int, power: float, seed: int
) -> None:
    """For any gamma from 1e-4 to 1e4, and classes of very different size, some of them empty."""
    draw = np.random.default_rng(seed)
    labels = draw.choice(classes, 211, p=draw.dirichlet(np.full(classes, 0.7)))
    holder = fill(alpha(10.0**power), make_pool(labels, classes, clients, seed))
    assert np.bincount(holder + 1, minlength=clients + 1).tolist() == [211 % clients] + [211 // clients] * clients


def test_the_paper_s_ten_class_probabilities() -> None:
    assert rules.fedmatch_class_probabilities(10).tolist() == [
        0.5,
        0.15,
        0.03,
        0.03,
        0.03,
        0.02,
        0.03,
        0.03,
        0.03,
        0.15,
    ]


@pytest.mark.parametrize(
    ("classes", "wanted"),
    [
        (1, [1]),
        (2, [50 / 80, 30 / 80]),
        (3, [50 / 80, 15 / 80, 15 / 80]),
        (4, [0.5, 0.15, 0.2, 0.15]),
        (7, [0.5, 0.15, 0.05, 0.05, 0.05, 0.05, 0.15]),
    ],
)
def test_other_numbers_of_classes(classes: int, wanted: list[float]) -> None:
    """Half, 15 % to each neighbor, 20 % to the others; two classes are one neighbor twice, three have no others."""
    np.testing.assert_allclose(rules.fedmatch_class_probabilities(classes), wanted)


def test_peaked_clients_of_cifar() -> None:
    """450 rows each: 225 of the main class, 67.5 of both neighbors, 9 of the opposite class, 13.5 of the others;
    ten types use each pool of 4,500 up."""
    labels = mixed(45_000, 10)
    counts = table(rules.assign_peaked_classes(SplitOptions(), make_pool(labels, 10, 100)), labels, 100, 10)
    assert (counts.sum(1) == 450).all()
    assert (counts.sum(0) == 4500).all()
    for k in range(100):
        turned = np.roll(counts[k], -(k % 10))
        assert np.abs(turned - 450 * np.array(rules.FEDMATCH_CLASS_PROBABILITIES)).max() < 1


def test_peaked_clients_of_uneven_classes_stay_within_the_pools() -> None:
    """A class of 50 rows cannot give half of 4 clients' 47 to each of them; nobody gets the 2 rows left over."""
    labels = np.repeat([0, 1, 2], [50, 100, 40])
    counts = table(rules.assign_peaked_classes(SplitOptions(), make_pool(labels, 3, 4)), labels, 4, 3)
    assert (counts.sum(1) == 47).all()
    assert (counts.sum(0) <= [50, 100, 40]).all()
    assert counts.sum() == 188
    # The cross ratios of (5, 1.5, 1.5) are retained, so each client still stands out in its class: 0 and 3 in class 0.
    assert counts[0, 0] > counts[2, 0]
    assert counts[1, 1] > counts[0, 1]
    assert counts[2, 2] > counts[1, 2]


def test_equal_classes_take_what_the_smallest_allows() -> None:
    """Of 50, 100 and 40 rows, four clients take 10 of each class, and nobody the other 70."""
    labels = np.repeat([0, 1, 2], [50, 100, 40])
    holder = rules.assign_equal_classes(SplitOptions(), make_pool(labels, 3, 4))
    assert (table(holder, labels, 4, 3) == 10).all()
    assert (holder == -1).sum() == 70
    with pytest.raises(
        UserError, match="class c has 40 labeled images to share, fewer than one for each of 41 clients"
    ):
        rules.assign_equal_classes(SplitOptions(), make_pool(labels, 3, 41))


def test_thinning_selects_a_share_of_each_clients_unlabeled_rows() -> None:
    """Three clients of 10, 20, 30 unlabeled and 4 labeled rows: a quarter is 2.5 -> 2, 5, 7.5 -> 8 (half to even)."""
    client = np.repeat([0, 1, 2, -2], [14, 24, 34, 5])
    labeled = np.concatenate([np.arange(n) < 4 for n in (14, 24, 34)] + [np.ones(5, bool)])
    thin = rules.reduce_unlabeled(client, labeled, 0.25, named_generator(0, "thin"))
    assert [int((thin[~labeled] == k).sum()) for k in range(3)] == [2, 5, 8]
    assert (thin[labeled] == client[labeled]).all(), "labeled rows stay, the server's too"
    assert set(thin[~labeled]) == {-1, 0, 1, 2}
    more = rules.reduce_unlabeled(client, labeled, 0.5, named_generator(0, "thin"))
    assert ((thin == -1) | (more == client)).all(), "the smaller share is inside the larger one"
    minimum = rules.reduce_unlabeled(client, labeled, 0.001, named_generator(0, "thin"))
    assert [int((minimum[~labeled] == k).sum()) for k in range(3)] == [1, 1, 1]
