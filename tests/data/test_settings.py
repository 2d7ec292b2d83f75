"""The settings of SemiFL, FedDB, FedLoKe and FedMatch by their published counts, and which clients have labels."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scenario import CIFAR, paper_scenario, sizes

from halfmoon.core.errors import UserError
from halfmoon.data import SERVER, Scenario, Split
from halfmoon.data.partition.heterogeneity import class_shares, count_rows, total_variation
from halfmoon.data.partition.scenario import SETTINGS, LabelLocation

CIFAR100 = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 500))
SVHN = np.repeat(np.arange(10), (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659))


LABEL_LOCATIONS: tuple[LabelLocation, ...] = get_args(LabelLocation)


def three_numbers(of: np.ndarray) -> list[float]:
    return [of.min(), float(np.median(of)), of.max()]


@pytest.mark.parametrize(
    ("labels", "classes", "requested", "size", "dropped"),
    [
        (CIFAR, 10, 250, 497, 50),
        (CIFAR, 10, 4000, 460, 0),
        (CIFAR100, 100, 2500, 475, 0),
        (CIFAR100, 100, 10_000, 400, 0),
        (SVHN, 10, 250, 730, 7),
        (SVHN, 10, 1000, 722, 57),
    ],
)
def test_semifl_iid_sizes(labels: np.ndarray, classes: int, requested: int, size: int, dropped: int) -> None:
    """The notes' table A1: floor(pool / 100) rows a client, the remainder dropped; the pool is what is not labeled."""
    split = paper_scenario("semifl-iid", labels=requested, labels_at="server").split(labels, classes)
    assert set(sizes(split, False)) == {size}
    assert (split.client == -1).sum() == dropped
    held = np.bincount(labels[split.rows(SERVER, True)], minlength=classes)
    assert held.tolist() == [requested // classes] * classes
    assert not sizes(split, True).any()


def test_semifl_shards_of_cifar_and_svhn() -> None:
    """CIFAR-10 with 4,000 labels: 20 shards of 230 a class. SVHN's shards follow the class: class 1 has 13,861 - 100
    rows left, 13,761 / 20 = 688 and one more in the first shard; class 9 has 4,559, 227 and one more in 19."""
    scenario = paper_scenario("semifl-shards", labels=4000, labels_at="server")
    _, held = count_rows(scenario.split(CIFAR, 10), CIFAR, 10)
    assert set(np.unique(held)) <= {0, 230, 460}
    assert (held.sum(1) == 460).all()
    split = replace(scenario, labels=1000).split(SVHN, 10)
    _, held = count_rows(split, SVHN, 10)
    assert set(np.unique(held[:, 1])) <= {0, 688, 689, 2 * 688, 688 + 689}
    assert set(np.unique(held[:, 9])) <= {0, 227, 228, 227 + 228, 2 * 228}
    assert ((held > 0).sum(1) <= 2).all()
    assert (split.client != -1).all()


def test_more_shards_are_more_classes() -> None:
    """Five of CIFAR-10's 500 shards each: 10 * (1 - C(450, 5) / C(500, 5)) = 4.11 classes a client."""
    split = paper_scenario("semifl-shards", classes_per_client=5, labels=4000).split(CIFAR, 10)
    for held in count_rows(split, CIFAR, 10):
        assert 3.9 < (held > 0).sum(1).mean() < 4.3


@pytest.mark.parametrize("seed", range(2))
def test_semifl_dirichlet_has_the_published_shape(seed: int) -> None:
    """Measured in the notes, min / median / max and classes: CIFAR-10 with 4,000 labels 18 / 406 / 1876 and 4.2 at
    gamma 0.1, 101 / 470 / 1070 and 7.1 at 0.3; CIFAR-100 with 10,000 189 / 408 / 594 and 31 at 0.1."""
    scenario = paper_scenario("semifl-dir", dirichlet_alpha=0.1, labels=4000, labels_at="server", seed=seed)
    for dirichlet_alpha, middle, maximum, present in (
        (0.1, (340, 440), (1500, 2400), (3.8, 4.6)),
        (0.3, (440, 500), (900, 1400), (6.7, 7.5)),
    ):
        _, held = count_rows(replace(scenario, dirichlet_alpha=dirichlet_alpha).split(CIFAR, 10), CIFAR, 10)
        smallest, median, largest = three_numbers(held.sum(1))
        assert 10 <= smallest < 150
        assert middle[0] < median < middle[1]
        assert maximum[0] < largest < maximum[1]
        assert present[0] < (held > 0).sum(1).mean() < present[1]
    _, held = count_rows(replace(scenario, labels=10_000).split(CIFAR100, 100), CIFAR100, 100)
    smallest, median, largest = three_numbers(held.sum(1))
    assert smallest > 130
    assert 395 < median < 420
    assert 540 < largest < 700
    assert 29 < (held > 0).sum(1).mean() < 33


@pytest.mark.parametrize(
    ("dirichlet_alpha", "median", "maximum", "present"),
    [(0.1, (30, 42), (110, 260), 3.0), (0.3, (36, 44), (70, 130), 5.4)],
)
def test_feddb_spreads_its_labels_down_to_one(dirichlet_alpha, median, maximum, present):
    """Measured in the notes for 4,000 labels of CIFAR-10: 1 / 36 / 173 and 3.0 classes, 6 / 40 / 100 and 5.4."""
    split = paper_scenario("feddb-dir", dirichlet_alpha=dirichlet_alpha, labels=4000).split(CIFAR, 10)
    labeled, unlabeled = count_rows(split, CIFAR, 10)
    smallest, middle, largest = three_numbers(labeled.sum(1))
    assert 1 <= smallest < 20
    assert median[0] < middle < median[1]
    assert maximum[0] < largest < maximum[1]
    assert abs((labeled > 0).sum(1).mean() - present) < 0.4
    assert labeled.sum() == 4000
    # Two draws: labels say nothing about the unlabeled rows of a client.
    assert abs(np.corrcoef(class_shares(labeled).ravel(), class_shares(unlabeled).ravel())[0, 1]) < 0.15


def test_feddb_requires_one_row_and_semifl_ten() -> None:
    """400 rows a client at gamma 0.1: a smallest client below 10 is common in the one and impossible in the other."""

    def least(setting: str) -> list[int]:
        splits = [
            paper_scenario(setting, dirichlet_alpha=0.1, labels=4000, seed=s, labels_at="server") for s in range(8)
        ]
        return [int(sizes(one.split(CIFAR, 10), False).min()) for one in splits]

    assert min(least("semifl-dir")) >= 10
    assert 1 <= min(least("feddb-dir")) < 10


def test_feddb_iid_sizes() -> None:
    """40 + 460 for CIFAR-10 with 4,000 labels; 10 + 722 for SVHN with 1,000; random classes among the labels."""
    split = paper_scenario("feddb-iid", labels=4000).split(CIFAR, 10)
    assert set(sizes(split, True)) == {40}
    assert set(sizes(split, False)) == {460}
    labeled, _ = count_rows(split, CIFAR, 10)
    assert (labeled == 0).any()
    split = paper_scenario("feddb-iid", labels=1000).split(SVHN, 10)
    assert (set(sizes(split, True)), set(sizes(split, False))) == ({10}, {722})


@pytest.mark.parametrize("setting", ["fedloke", "fedloke-balanced"])
@pytest.mark.parametrize(
    ("labels", "size", "dropped", "marked"), [(CIFAR, 1000, 0, (10, 50, 100)), (SVHN, 1465, 7, (14, 73, 146))]
)
def test_fedloke_sizes(setting: str, labels: np.ndarray, size: int, dropped: int, marked: tuple[int, ...]) -> None:
    """The notes' 1.3: equal sizes and int(r * n) labels for r = 1, 5, 10 %; the same clients for every ratio, and the
    labels of a smaller ratio among those of a larger."""
    splits = [paper_scenario(setting, 50, 0.1, label_ratio=r).split(labels, 10) for r in (0.01, 0.05, 0.1)]
    for split, wanted in zip(splits, marked, strict=True):
        assert set(sizes(split, True)) == {wanted}
        assert set(sizes(split, False)) == {size - wanted}
        assert (split.client == -1).sum() == dropped
        np.testing.assert_array_equal(split.client, splits[0].client)
        assert split.labeled[splits[0].labeled].all()


@pytest.mark.parametrize("setting", ["fedloke", "fedloke-balanced"])
def test_fedloke_labels_have_the_mix_of_the_client(setting: str) -> None:
    """100 random labels of a client's 1,000 rows: class shares are off by sqrt(q (1 - q) / 100), a total variation of
    at most 0.4 * sqrt(9 / 100) = 0.12 by Cauchy and Schwarz; two independent Dirichlets at gamma 0.5 are 0.6 apart."""
    labeled, unlabeled = count_rows(paper_scenario(setting, 50, 0.5, label_ratio=0.1).split(CIFAR, 10), CIFAR, 10)
    assert total_variation(class_shares(labeled), class_shares(unlabeled)).mean() < 0.12
    assert (labeled == 0).any()


def test_fedloke_counts_labels_by_client() -> None:
    """5 labels a class and client are 50 of each client's 1,000 rows; 0.29 of 100 rows are 29, not the 28 of int()."""
    assert set(sizes(paper_scenario("fedloke", 50).split(CIFAR, 10), True)) == {50}
    assert set(sizes(paper_scenario("fedloke", 50, label_ratio=0.29).split(CIFAR[:5000], 10), True)) == {29}


def test_pair_blocks_are_milder_than_their_alpha() -> None:
    """20 clients on CIFAR-10 with 25 labels a class and client: equal sizes, every block even in its classes.
    The exponential of a client's class entropy is near 5.9, 7.2 and 7.9 at alpha 0.1, 0.5 and 1; an ordinary Dirichlet
    has 2.6 at 0.1. Labeled and unlabeled rows are drawn apart, so a client's two mixes differ by about 0.4."""
    found = {}
    for alpha in (0.1, 0.5, 1.0):
        split = paper_scenario("pair-dir", 20, dirichlet_alpha=alpha, labels_per_class=25).split(CIFAR, 10)
        assert sizes(split, True).tolist() == [250] * 20
        assert sizes(split, False).tolist() == [2250] * 20
        mixes = np.array([np.bincount(CIFAR[split.rows(k, False)], minlength=10) / 2250 for k in range(20)])
        logs = np.log(mixes, out=np.zeros_like(mixes), where=mixes > 0)
        found[alpha] = float(np.exp(-(mixes * logs).sum(1)).mean())
        blocks = mixes.reshape(10, 2, 10).mean(1)
        assert np.abs(blocks - 0.1).max() < 0.025  # 4,500 random rows
        if alpha == 0.1:
            labeled = np.array([np.bincount(CIFAR[split.rows(k, True)], minlength=10) / 250 for k in range(20)])
            assert 0.3 < float(np.abs(labeled - mixes).sum(1).mean() / 2) < 0.55
    assert found[0.1] == pytest.approx(5.9, abs=0.5)
    assert found[0.5] == pytest.approx(7.2, abs=0.5)
    assert found[1.0] == pytest.approx(7.9, abs=0.5)


def test_the_last_of_an_odd_number_of_clients_has_no_partner() -> None:
    """Five clients of 100 rows: the fifth has random ones."""
    labels = np.repeat(np.arange(4), 130)
    split = paper_scenario("pair-dir", 5, dirichlet_alpha=0.1, label_ratio=0.1).split(labels, 4)
    assert len(set(sizes(split, False).tolist())) == 1
    assert min(np.bincount(labels[split.rows(4, False)], minlength=4)) > 10


def test_fedmatch_iid_of_cifar() -> None:
    labeled, unlabeled = count_rows(paper_scenario("fedmatch-iid").split(CIFAR, 10), CIFAR, 10)
    assert (labeled == 5).all()
    assert (unlabeled == 45).all()


def test_fedmatch_noniid_peaks_only_unlabeled_rows() -> None:
    """Half of 450 unlabeled rows are of the client's class, and labels are balanced: the total variation of
    (.50, .15, .15, .03 x 6, .02) to a tenth each is .4 + .05 + .05 = 0.5."""
    split = paper_scenario("fedmatch-noniid").split(CIFAR, 10)
    labeled, unlabeled = count_rows(split, CIFAR, 10)
    assert (labeled == 5).all()
    assert np.abs(unlabeled[np.arange(100), np.arange(100) % 10] - 225).max() < 1
    assert total_variation(class_shares(labeled), class_shares(unlabeled)).mean() == pytest.approx(0.5, abs=0.01)


def test_a_stream_shows_its_parts_in_turn() -> None:
    """450 unlabeled rows in 4 stages are 113, 112, 113, 112; labeled rows stay; a stage has the client's mix, in
    whatever order the file has its rows."""
    labels = np.sort(CIFAR)
    scenario = paper_scenario("fedmatch-stream", stages=4)
    split = scenario.split(labels, 10)
    still = replace(scenario, setting="fedmatch-noniid", stages=1).split(labels, 10)
    np.testing.assert_array_equal(split.client, still.client)
    assert (split.stages, still.stages) == (4, 1)
    for k in (0, 57, 99):
        parts = [split.rows(k, False, stage) for stage in range(4)]
        assert [len(group) for group in parts] == [113, 112, 113, 112]
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), split.rows(k, False))
        np.testing.assert_array_equal(split.rows(k, True, 3), split.rows(k, True))
        # Half of a stage's 112 rows, with a standard deviation of 5 at most.
        assert all(30 < (labels[group] == k % 10).sum() < 82 for group in parts)
        np.testing.assert_array_equal(still.rows(k, False, 2), still.rows(k, False))


def scenario_of(
    setting: str, label_location: LabelLocation, seed: int = 0, clients: int = 6, **fields: Any
) -> Scenario:
    """Return a scenario that 600 rows of 6 classes allow."""
    stages = 3 if setting == "fedmatch-stream" else 1
    some = 3 if label_location == "some" else None
    return paper_scenario(
        setting,
        clients,
        1.0,
        4,
        seed=seed,
        min_size=0,
        labels_at=label_location,
        labeled_clients=some,
        stages=stages,
        **fields,
    )


@settings(deadline=None)
@given(st.sampled_from(SETTINGS), st.sampled_from(LABEL_LOCATIONS), st.integers(0, 10**9), st.sampled_from([3, 6, 12]))
def test_every_setting_satisfies_its_description(
    setting: str, label_location: LabelLocation, seed: int, clients: int
) -> None:
    """A row has one holder at most; labels are where they should be; few rows go to nobody; a seed is a split."""
    labels = np.random.default_rng(seed).permutation(np.arange(600) % 6)
    scenario = scenario_of(setting, label_location, seed, clients)
    split = scenario.split(labels, 6)
    repeated = scenario.split(labels, 6)
    np.testing.assert_array_equal(split.client, repeated.client)
    np.testing.assert_array_equal(split.labeled, repeated.labeled)
    holders = [SERVER, -1, *range(clients)]
    rows = [split.rows(k, labeled) for k in holders for labeled in (True, False)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(600))
    pooled = label_location == "server" or "fedloke" not in setting
    at_clients = sizes(split, True)
    if pooled:
        assert np.bincount(labels[split.labeled]).tolist() == [4 * clients] * 6
    else:
        assert set(at_clients) - {0} == {24}
    assert len(split.rows(SERVER, True)) == (24 * clients if label_location == "server" else 0)
    assert (at_clients > 0).sum() <= {"clients": clients, "server": 0, "some": 3}[label_location]
    # What equal sizes leave: fewer than one row a client, of labels and of the rest; equal classes: of each class.
    assert (split.client == -1).sum() < clients * (6 if setting == "fedmatch-iid" else 2)
    assert Scenario(**split.origin.scenario) == scenario


@pytest.mark.parametrize("setting", SETTINGS)
def test_location_of_labels_changes_only_labels(setting: str) -> None:
    """The pool and the unlabeled rows' holders come from streams of their own; FedLoKe's clients mark rows."""
    labels = np.random.default_rng(5).permutation(np.arange(600) % 6)
    here, some, there = (
        scenario_of(setting, label_location).split(labels, 6) for label_location in ("clients", "some", "server")
    )
    if "fedloke" in setting:
        np.testing.assert_array_equal(here.client, some.client)
        assert (here.labeled[some.labeled]).all()
        return
    for other in (some, there):
        np.testing.assert_array_equal(here.labeled, other.labeled)
        np.testing.assert_array_equal(here.client[~here.labeled], other.client[~here.labeled])
    assert (there.client[there.labeled] == SERVER).all()
    others = [scenario_of(setting, "some", seed).split(labels, 6) for seed in range(5)]
    assert len({tuple(np.unique(each.client[each.labeled & (each.client >= 0)])) for each in others}) > 1


def test_some_clients_share_the_whole_pool() -> None:
    """500 labels of each class over 10 of 100 clients are 50 each, dealt evenly; 90 clients have unlabeled rows."""
    scenario = paper_scenario("iid-dir", labels_at="some", labeled_clients=10)
    labeled, unlabeled = count_rows(scenario.split(CIFAR, 10), CIFAR, 10)
    assert sorted(set(map(tuple, labeled.tolist()))) == [(0,) * 10, (50,) * 10]
    assert (labeled.sum(1) > 0).sum() == 10
    assert (unlabeled.sum(1) > 0).all()


def test_labels_in_all_are_floor_labels_by_classes_of_each() -> None:
    """104 labels of 10 classes are 10 of each, as labels // classes is; 10 a class are also 2 a class and 5 clients."""
    split = paper_scenario(clients=5, labels=104).split(CIFAR[:2000], 10)
    same = paper_scenario(clients=5, labels_per_class=2).split(CIFAR[:2000], 10)
    np.testing.assert_array_equal(split.labeled, same.labeled)
    np.testing.assert_array_equal(split.client, same.client)
    assert split.labeled.sum() == 100


def test_a_file_from_before_stages_is_read(tmp_path: Path) -> None:
    """Such a file has three columns and an origin without the newer fields."""
    scenario = paper_scenario("iid-iid", 5)
    split = scenario.split(CIFAR[:500], 10)
    newer = (
        "labels",
        "labels_at",
        "labeled_clients",
        "classes_per_client",
        "stages",
        "unlabeled_share",
        "unknown_share",
    )
    older = {name: value for name, value in asdict(scenario).items() if name not in newer}
    assert len(older) == 9
    replace(split, origin=replace(split.origin, scenario=older)).save(tmp_path / "old.parquet")
    repeated = Split.load(tmp_path / "old.parquet")
    assert repeated.stage is None
    assert Scenario(**repeated.origin.scenario) == scenario
    assert pq.read_table(tmp_path / "old.parquet").column_names == ["row", "client", "labeled"]


def test_rows_that_cannot_be_are_refused() -> None:
    client = np.array([SERVER, 0, 0])
    labeled = np.array([True, True, False])
    Split(client, labeled, 1, stage=np.array([0, 0, 2]))
    with pytest.raises(UserError, match="row 0 of the split is the server's and unlabeled, but a server has labeled"):
        Split(client, ~labeled, 1)
    with pytest.raises(UserError, match=r"row 1 of the split has stage 1; .* give labeled rows stage 0"):
        Split(client, labeled, 1, stage=np.array([0, 1, 2]))
    with pytest.raises(UserError, match="row 2 of the split has stage -1"):
        Split(client, labeled, 1, stage=np.array([0, 0, -1]))
    for wrong in (np.zeros(2, np.int64), np.zeros(3)):
        with pytest.raises(UserError, match=r"a split of 3 rows needs stage as int64 \(3,\)"):
            Split(client, labeled, 1, stage=wrong)
    with pytest.raises(UserError, match="row 0 of the split belongs to client -3"):
        Split(client - 1, labeled, 1)
