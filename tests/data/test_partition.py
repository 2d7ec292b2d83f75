"""Partitions: the routines against an oracle written from the rule, exact sizes, and the file of a split."""

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.core.errors import UserError
from halfmoon.data import Images, Scenario, Source, Split, load
from halfmoon.data.partition.primitives import (
    apportion,
    draw_labeled,
    named_generator,
    rows_by_client,
    spread_by_dirichlet,
    spread_evenly,
)
from halfmoon.data.partition.split import SplitOrigin, hash_labels


def mixed(count: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.arange(count) % classes)


def test_random_streams_depend_only_on_their_names() -> None:
    def first(*text: str, seed: int = 0) -> int:
        return int(named_generator(seed, *text).integers(2**62))

    numbers = [first(), first("a"), first("b"), first("a", "b"), first("ab"), first("b", "a"), first("a", seed=1)]
    assert len(set(numbers)) == len(numbers)
    assert first("a", "b") == numbers[3]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=12), st.integers(0, 300))
def test_apportion_differs_from_the_exact_share_by_less_than_one(weights: list[int], total: int) -> None:
    parts = apportion(np.array(weights), total)
    assert parts.sum() == total
    exact = np.array(weights) * total / sum(weights)
    assert (np.abs(parts - exact) < 1).all()


@given(st.integers(20, 200), st.integers(1, 5), st.integers(0, 5), st.integers(0, 9))
def test_labeled_pool_has_the_requested_counts(count: int, classes: int, requested: int, seed: int) -> None:
    labels = mixed(count, classes, seed)
    chosen = draw_labeled(labels, np.full(classes, min(requested, count // classes)), named_generator(seed, "pool"))
    assert np.bincount(labels[chosen], minlength=classes).tolist() == [min(requested, count // classes)] * classes


def test_a_larger_pool_contains_the_smaller() -> None:
    """The pool is the first rows of one permutation, so runs with more labels see those of runs with fewer."""
    labels = mixed(300, 3)
    small, large = (draw_labeled(labels, np.full(3, n), named_generator(0, "pool")) for n in (10, 40))
    assert (large[small]).all()


@given(st.integers(1, 300), st.integers(1, 6), st.integers(1, 40), st.integers(0, 99))
def test_dealing_is_even_in_every_class_and_in_all(count: int, classes: int, clients: int, seed: int) -> None:
    labels = mixed(count, classes, seed)
    holder = spread_evenly(labels, clients, named_generator(seed, "deal"))
    sizes = np.bincount(holder, minlength=clients)
    assert sizes.max() - sizes.min() <= 1
    for label in range(classes):
        of_class = np.bincount(holder[labels == label], minlength=clients)
        assert of_class.max() - of_class.min() <= 1


def test_dealing_is_random_inside_a_class() -> None:
    labels = np.zeros(1000, np.int64)
    a, b = (spread_evenly(labels, 10, named_generator(seed, "deal")) for seed in (0, 1))
    # Two independent even deals agree on a tenth of the rows: 100, with a standard deviation near 9.5.
    assert 50 < (a == b).sum() < 150


def oracle(labels, clients, dirichlet_alpha, draw, min_size):
    """The routine in words of section 1.3 of the notes on FedDure: lists of rows, one comparison at a time."""
    while True:
        held: list[list[int]] = [[] for _ in range(clients)]
        for label in range(int(labels.max()) + 1):
            rows = draw.permutation([row for row in range(len(labels)) if labels[row] == label])
            p = draw.dirichlet([dirichlet_alpha] * clients).tolist()
            for j in range(clients):
                if len(held[j]) >= len(labels) / clients:
                    p[j] = 0.0
            total = np.sum(p)
            reached = 0.0
            start = 0
            for j in range(clients):
                reached += p[j] / total
                end = len(rows) if j == clients - 1 else int(np.floor(reached * len(rows)))
                held[j] += [int(row) for row in rows[start:end]]
                start = end
        if min(len(rows) for rows in held) >= min_size:
            return held


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("dirichlet_alpha", "clients", "min_size"), [(0.5, 20, 10), (0.2, 8, 12), (5.0, 30, 15)])
def test_spread_equals_the_described_algorithm(seed: int, dirichlet_alpha: float, clients: int, min_size: int) -> None:
    labels = mixed(1000, 10, seed)
    holder = spread_by_dirichlet(labels, clients, dirichlet_alpha, named_generator(seed, "x"), min_size=min_size)
    held = oracle(labels, clients, dirichlet_alpha, named_generator(seed, "x"), min_size)
    for k in range(clients):
        assert np.flatnonzero(holder == k).tolist() == sorted(held[k])


@settings(deadline=None)
@given(st.integers(2, 30), st.floats(1e-3, 100), st.integers(1, 8), st.booleans(), st.integers(0, 10**6))
def test_spread_gives_every_row_to_one_client(
    clients: int, dirichlet_alpha: float, classes: int, cap: bool, seed: int
) -> None:
    labels = mixed(240, classes, seed)
    holder = spread_by_dirichlet(labels, clients, dirichlet_alpha, named_generator(seed, "x"), min_size=0, cap=cap)
    assert holder.shape == labels.shape
    assert holder.min() >= 0
    assert holder.max() < clients
    if cap:
        # A client below N / K may take one more class, whole, and nothing after that; the last client also takes
        # what rounding leaves, at most one row a class.
        sizes = np.bincount(holder, minlength=clients)
        largest = np.bincount(labels).max()
        assert sizes.max() < len(labels) / clients + largest + classes


def test_a_tiny_gamma_gives_each_class_to_few_and_a_huge_one_to_all() -> None:
    labels = mixed(4000, 4)
    rare = spread_by_dirichlet(labels, 8, 1e-3, named_generator(0, "x"), min_size=0)
    even = spread_by_dirichlet(labels, 8, 1e6, named_generator(0, "x"), min_size=1)
    holders = [len(set(rare[labels == label].tolist())) for label in range(4)]
    assert max(holders) <= 3
    sizes = np.bincount(even * 4 + labels, minlength=32)
    # 125 rows a cell; the shares are exact to a permille, cutting and the last client add a row or two.
    assert np.abs(sizes - 125).max() <= 3


def test_class_of_a_full_client_is_assigned_to_another() -> None:
    """With gamma 1e-6 the shares are one 1 and zeros. Five classes of 40 rows, five clients, cap 40: whoever has a
    class is full, so each class must go to another client even where its draw named a full one, and all
    sizes are 40, but for what rounding moves to the last client, at most one row a class."""
    labels = np.repeat(np.arange(5), 40)
    for seed in range(20):
        sizes = np.bincount(spread_by_dirichlet(labels, 5, 1e-6, named_generator(seed, "x"), min_size=0), minlength=5)
        assert np.abs(sizes - 40).max() <= 5


def test_unreachable_min_size_is_refused_with_the_best_result() -> None:
    labels = mixed(200, 2)
    with pytest.raises(
        UserError, match=r"in 7 draws .* dirichlet_alpha 0.05 gave each of 10 clients 18 rows; the best minimum was"
    ):
        spread_by_dirichlet(labels, 10, 0.05, named_generator(0, "x"), min_size=18, tries=7)
    draw = named_generator(3, "x")
    best = max(
        int(np.bincount(spread_by_dirichlet(labels, 5, 0.5, draw, min_size=0), minlength=5).min()) for _ in range(3)
    )
    assert 0 < best < 30
    with pytest.raises(
        UserError, match=f"minimum was {best}, and . or more had fewer. Ask for 2 clients, or set min_size to {best} or"
    ):
        spread_by_dirichlet(labels, 5, 0.5, named_generator(3, "x"), min_size=39, tries=3)


def test_impossible_split_of_thousands_of_clients_is_refused_quickly_with_advice() -> None:
    """Of 5,000 clients dozens have nothing in each draw: three are enough to know it; the proposed number of clients succeeds."""
    labels = mixed(20_000, 10)
    draw = named_generator(0, "many")
    with pytest.raises(UserError, match="in 3 draws no split") as caught:
        spread_by_dirichlet(labels, 5000, 0.5, draw, min_size=1)
    text = re.search(r"Raise dirichlet_alpha to ([\d.]+), or ask for (\d+) clients", str(caught.value))
    assert text
    for clients, alpha in ((5000, float(text[1])), (int(text[2]), 0.5)):
        assert (
            np.bincount(
                spread_by_dirichlet(labels, clients, alpha, named_generator(1, "many"), min_size=1), minlength=clients
            ).min()
            >= 1
        )


def test_rows_of_each_client_are_found_in_one_pass() -> None:
    """As by looking for each client's rows; nobody's (-1) and the server's (-2) are no client's."""
    client = np.random.default_rng(0).integers(-2, 7, 300)
    found = rows_by_client(client, 8)
    assert len(found) == 8
    assert all(np.array_equal(rows, np.flatnonzero(client == k)) for k, rows in enumerate(found))


def tiny(labels: np.ndarray) -> Source:
    images = np.zeros((len(labels), 2, 2, 1), np.uint8)
    dataset = Images(images, labels)
    return Source("tiny", dataset, dataset, ("a", "b", "c"), True, (0.0,), (1.0,))


def test_rows_of_a_client_are_sorted() -> None:
    split = Split(np.array([1, 0, 1, -1, 1]), np.array([True, True, False, False, True]), 2)
    assert split.rows(1, True).tolist() == [0, 4]
    assert split.rows(1, False).tolist() == [2]
    assert split.rows(0, False).tolist() == []
    assert len(split) == 5


def test_a_split_that_does_not_fit_itself_is_refused() -> None:
    client = np.array([0, 1, 2])
    labeled = np.zeros(3, bool)
    with pytest.raises(UserError, match="row 2 of the split belongs to client 2, but there are 2 clients"):
        Split(client, labeled, 2)
    with pytest.raises(UserError, match="one client and one mark per row, but has 3 and 2"):
        Split(client, labeled[:2], 3)
    with pytest.raises(UserError, match="int64"):
        Split(client.astype(np.int32), labeled, 3)


@pytest.mark.parametrize(
    ("scenario", "more"),
    [
        (Scenario(clients=7, seed=3), []),
        (Scenario("fedmatch-stream", 7, stages=3, labels_at="server", seed=3), ["stage"]),
    ],
)
def test_saved_split_is_loaded_with_its_origin(tmp_path: Path, scenario: Scenario, more: list[str]) -> None:
    source = load("digits")
    split = scenario.split(source.train.labels, source.classes, source.name)
    path = tmp_path / "run" / "split.parquet"
    split.save(path)
    repeated = Split.load(path)
    np.testing.assert_array_equal(repeated.client, split.client)
    np.testing.assert_array_equal(repeated.labeled, split.labeled)
    np.testing.assert_array_equal(repeated.stage, split.stage)
    assert (repeated.clients, repeated.origin) == (7, split.origin)
    assert Scenario(**repeated.origin.scenario) == scenario
    assert repeated.origin.labels_sha256 == hash_labels(source.train.labels)
    repeated.check(source)
    table = pq.read_table(path)
    assert table.column_names == ["row", "client", "labeled", *more]
    assert table.column("row").to_pylist() == list(range(1437))
    stored_metadata = json.loads(table.schema.metadata[b"halfmoon"])
    assert (
        stored_metadata["source"],
        stored_metadata["images"],
        stored_metadata["seed"],
        stored_metadata["clients"],
    ) == ("digits", 1437, 3, 7)
    assert [entry.name for entry in path.parent.iterdir()] == ["split.parquet"]
    first = path.read_bytes()
    split.save(path)
    assert path.read_bytes() == first


def test_the_hash_is_that_of_little_endian_numbers() -> None:
    """sha256 of the 16 bytes 01 00*7 02 00*7, by hashlib's own rule, whatever type the labels have."""
    wanted = hashlib.sha256(bytes([1, *[0] * 7, 2, *[0] * 7])).hexdigest()
    for kind in (np.int64, np.uint8, ">i4"):
        assert hash_labels(np.array([1, 2], kind)) == wanted


def test_a_split_of_other_data_is_refused() -> None:
    labels = mixed(90, 3)
    split = Scenario(clients=3).split(labels, 3, "mine")
    split.check(tiny(labels))
    with pytest.raises(UserError, match=r"made for mine \(90 images\), but tiny has 60"):
        split.check(tiny(labels[:60]))
    with pytest.raises(UserError, match="labels of tiny differ"):
        split.check(tiny(np.roll(labels, 1)))
    replace(split, origin=SplitOrigin()).check(tiny(np.roll(labels, 1)))


@pytest.mark.parametrize(
    ("change", "metadata", "message"),
    [
        (lambda table: table, {}, "has no metadata about the data set"),
        (lambda table: table, {b"halfmoon": b"{"}, "has no metadata about the data set"),
        (lambda table: table.drop_columns(["labeled"]), None, r"columns must be .* but are row int64, client int64"),
        (lambda table: table.slice(1), None, "its rows are not 0 to 89 in order"),
        (lambda table: table.set_column(1, "client", pa.array([None] * 90, pa.int64())), None, "a value is missing"),
        (
            lambda table: table.set_column(1, "client", pa.array([5] * 90)),
            None,
            "row 0 of the split belongs to client 5",
        ),
    ],
)
def test_a_changed_split_is_named(tmp_path: Path, change, metadata, message: str) -> None:
    path = tmp_path / "split.parquet"
    Scenario(clients=3).split(mixed(90, 3), 3).save(path)
    table = pq.read_table(path)
    stored_metadata = table.schema.metadata if metadata is None else metadata
    pq.write_table(change(table).replace_schema_metadata(stored_metadata), path)
    with pytest.raises(UserError, match=message):
        Split.load(path)


def test_a_file_that_is_no_split_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.parquet", tmp_path / "split.parquet"):
        (tmp_path / "split.parquet").write_bytes(b"nothing")
        with pytest.raises(UserError, match=rf"{path.name}: not a readable split"):
            Split.load(path)


def test_split_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    split = Split(np.zeros(2, np.int64), np.zeros(2, bool), 1)
    with pytest.raises(UserError, match="the split cannot be written"):
        split.save(tmp_path / "file" / "split.parquet")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(np.zeros(2, np.int64), np.zeros(2, bool), 1)
    path = tmp_path / "split.parquet"
    split.save(path)
    old = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(UserError, match="No space left on device"):
        split.save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_saved_split_does_not_need_pandas(tmp_path: Path) -> None:
    """PyArrow imports it to look at NumPy's arrays: a third of a second before a run's first step."""
    code = (
        "import sys; import numpy as np; from pathlib import Path; from halfmoon.data.partition.split import Split\n"
        "made = Split(np.array([0, 1, -1, 1]), np.array([True, False, False, True]), 2)\n"
        "made.save(Path(sys.argv[1])); print('pandas' in sys.modules)\n"
        "read = Split.load(Path(sys.argv[1]))\n"
        "assert (read.client == made.client).all() and (read.labeled == made.labeled).all()"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "split.parquet")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
