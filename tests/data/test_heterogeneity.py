"""Measures: numbers derived by hand, and the bounds of the two distances."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from halfmoon.data import SERVER, Images, Source, Split, summarize, take_share
from halfmoon.data.images import UNKNOWN
from halfmoon.data.partition.heterogeneity import class_shares, jensen_shannon, total_variation

# Client 0: labeled a a b, unlabeled b b. Client 1: labeled c, unlabeled c c c a. Client 2: labeled a. Nobody: one b.
LABELS = np.array([0, 0, 1, 1, 1, 2, 2, 2, 2, 0, 0, 1])
CLIENT = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, -1])
LABELED = np.array([1, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0], bool)
SPLIT = Split(CLIENT, LABELED, 3)

mixes = (
    hnp.arrays(np.int64, (2, 5), elements=st.integers(0, 50)).filter(lambda n: (n.sum(1) > 0).all()).map(class_shares)
)


def test_distance_of_an_empty_class_mix_is_undefined() -> None:
    shares = class_shares(np.array([[1, 3], [0, 0]]))
    assert shares[0].tolist() == [0.25, 0.75]
    assert np.isnan(shares[1]).all()
    assert np.isnan(total_variation(shares[0], shares[1]))
    assert np.isnan(jensen_shannon(shares[0], shares[1]))


def test_distances_by_hand() -> None:
    """p = (1/2, 1/2, 0), q = (0, 1/2, 1/2): TV = (1/2 + 0 + 1/2) / 2 = 1/2. The middle is (1/4, 1/2, 1/4) with 2/4 +
    1/2 + 2/4 = 3/2 bits, p and q have 1 bit each: JS = 3/2 - 1 = 1/2 bit. p = (1, 0), q = (1/2, 1/2): TV = 1/2; the
    middle (3/4, 1/4) has 2 - (3/4) log2(3) = 0.811278 bits, p none, q one: JS = 0.811278 - 0.5 = 0.311278."""
    p = np.array([0.5, 0.5, 0])
    q = np.array([0, 0.5, 0.5])
    assert total_variation(p, q) == pytest.approx(0.5)
    assert jensen_shannon(p, q) == pytest.approx(0.5)
    p = np.array([1.0, 0])
    q = np.array([0.5, 0.5])
    assert total_variation(p, q) == pytest.approx(0.5)
    assert jensen_shannon(p, q) == pytest.approx(0.311278, abs=1e-6)


@given(mixes)
def test_distances_are_symmetric_bounded_and_zero_for_the_same(pair: np.ndarray) -> None:
    p, q = pair
    for distance in (total_variation, jensen_shannon):
        assert distance(p, q) == pytest.approx(distance(q, p))
        assert distance(p, p) == pytest.approx(0, abs=1e-12)
    # JS <= TV in bits (Lin 1991, Theorem 3), and TV^2 / (2 ln 2) <= JS by Pinsker's inequality on both halves.
    tv = total_variation(p, q)
    js = jensen_shannon(p, q)
    assert tv**2 / (2 * np.log(2)) - 1e-9 <= js <= tv + 1e-9
    assert tv <= 1 + 1e-12


def test_distance_of_disjoint_class_mixes_is_one() -> None:
    p = np.array([0.3, 0.7, 0, 0])
    q = np.array([0, 0, 0.9, 0.1])
    assert total_variation(p, q) == pytest.approx(1)
    assert jensen_shannon(p, q) == pytest.approx(1)


def test_summary_by_hand() -> None:
    """Client 0: (2/3, 1/3, 0) against (0, 1, 0), TV 2/3. Client 1: (0, 0, 1) against (1/4, 0, 3/4), TV 1/4.
    Client 2 has no unlabeled row: no distance, left out of the mean (2/3 + 1/4) / 2 = 11/24.
    All labeled rows: (3, 1, 1) / 5. Against it: client 0 |2/3-3/5| + |1/3-1/5| + 1/5 = 2/5, TV 1/5;
    client 1: 3/5 + 1/5 + 4/5, TV 4/5; client 2: 2/5 + 1/5 + 1/5, TV 2/5; mean 7/15.
    All unlabeled rows: (1, 2, 3) / 6. Client 0: 1/6 + 4/6 + 3/6, TV 2/3; client 1: 1/12 + 4/12 + 3/12, TV 1/3."""
    metadata = summarize(SPLIT, LABELS, ("a", "b", "c"))
    assert metadata["counts"] == {
        "images": 12, "labeled": 5, "unlabeled": 6, "nobody": 1, "clients": 3, "classes": ["a", "b", "c"],
    }  # fmt: skip
    assert [client["tv"] for client in metadata["each"]] == [pytest.approx(2 / 3), pytest.approx(1 / 4), None]
    assert [client["labeled_classes"] for client in metadata["each"]] == [[2, 1, 0], [0, 0, 1], [1, 0, 0]]
    assert [client["unlabeled_classes"] for client in metadata["each"]] == [[0, 2, 0], [1, 0, 3], [0, 0, 0]]
    assert (metadata["each"][1]["labeled"], metadata["each"][1]["unlabeled"]) == (1, 4)
    assert metadata["each"][2]["js"] is None
    assert metadata["internal"] == pytest.approx({"mean": 11 / 24, "min": 1 / 4, "max": 2 / 3})
    assert metadata["external"]["labeled"] == pytest.approx({"mean": 7 / 15, "min": 1 / 5, "max": 4 / 5})
    assert metadata["external"]["unlabeled"] == pytest.approx({"mean": 1 / 2, "min": 1 / 3, "max": 2 / 3})
    assert metadata["sizes"] == {
        "labeled": {"min": 1, "median": 1.0, "max": 3},
        "unlabeled": {"min": 0, "median": 2.0, "max": 4},
    }
    assert metadata["present"] == {"labeled": pytest.approx(4 / 3), "unlabeled": 1.0}
    assert json.loads(json.dumps(metadata, allow_nan=False)) == metadata


def test_a_split_without_unlabeled_rows_has_no_distances() -> None:
    metadata = summarize(Split(np.zeros(3, np.int64), np.ones(3, bool), 1), np.array([0, 1, 1]), ("a", "b"))
    no_statistics = {"mean": None, "min": None, "max": None}
    assert metadata["internal"] == metadata["internal_js"] == metadata["external"]["unlabeled"] == no_statistics
    assert metadata["external"]["labeled"] == {"mean": 0.0, "min": 0.0, "max": 0.0}


def test_images_of_unknown_classes_are_counted_but_in_no_class() -> None:
    """Two clients of three images; the true labels of the unlabeled ones are unknown but for one of client 1."""
    split = Split(np.array([0, 0, 0, 1, 1, 1]), np.array([True, False, False, True, False, False]), 2)
    metadata = summarize(split, np.array([0, UNKNOWN, UNKNOWN, 1, UNKNOWN, 0]), ("a", "b"))
    assert (metadata["counts"]["labeled"], metadata["counts"]["unlabeled"]) == (2, 4)
    assert [client["unlabeled"] for client in metadata["each"]] == [2, 2]
    assert [client["unlabeled_classes"] for client in metadata["each"]] == [[0, 0], [1, 0]]
    assert [client["tv"] for client in metadata["each"]] == [None, 1.0]
    assert metadata["sizes"]["unlabeled"] == {"min": 2, "median": 2.0, "max": 2}


def test_server_with_labels_has_a_separate_row() -> None:
    """Server: a a b. Client 0: unlabeled b b, one a stage; client 1: unlabeled a and c, in stage 1. Nobody: one c.
    (2/3, 1/3, 0) against (1/4, 2/4, 1/4): 5/12 + 2/12 + 3/12, half of it is TV 5/12. Clients have no labels."""
    client = np.array([SERVER, SERVER, SERVER, 0, 0, 1, 1, -1])
    labels = np.array([0, 0, 1, 1, 1, 0, 2, 2])
    split = Split(client, client == SERVER, 2, stage=np.array([0, 0, 0, 0, 1, 1, 1, 2]))
    metadata = summarize(split, labels, ("a", "b", "c"))
    assert {**metadata["server"], "js": 0} == {
        "labeled": 3, "labeled_classes": [2, 1, 0], "tv": pytest.approx(5 / 12), "js": 0,
    }  # fmt: skip
    p = np.array([2, 1, 0]) / 3
    q = np.array([1, 2, 1]) / 4
    assert metadata["server"]["js"] == pytest.approx(jensen_shannon(p, q))
    numbers = {name: metadata["counts"][name] for name in ("images", "labeled", "unlabeled", "nobody")}
    assert numbers == {"images": 8, "labeled": 3, "unlabeled": 4, "nobody": 1}
    assert metadata["stages"] == [1, 3, 0]
    no_statistics = {"mean": None, "min": None, "max": None}
    assert metadata["internal"] == metadata["external"]["labeled"] == no_statistics
    # Unlabeled: (0, 1, 0) and (1/2, 0, 1/2) against (1/4, 1/2, 1/4): both a half.
    assert metadata["external"]["unlabeled"] == pytest.approx({"mean": 1 / 2, "min": 1 / 2, "max": 1 / 2})
    assert metadata["sizes"]["labeled"] == {"min": 0, "median": 0.0, "max": 0}
    assert json.loads(json.dumps(metadata, allow_nan=False)) == metadata
    assert summarize(SPLIT, LABELS, ("a", "b", "c"))["server"] is None
    assert summarize(SPLIT, LABELS, ("a", "b", "c"))["stages"] == [6]


def test_a_share_of_a_source_is_stratified_and_fixed() -> None:
    """30 % of 100 and 20 rows are 30 and 6; a class of one row keeps it; test images all stay."""
    labels = np.repeat([0, 1, 2], [100, 20, 1]).astype(np.int64)
    pixels = np.arange(121, dtype=np.uint8).reshape(-1, 1, 1, 1)
    source = Source("toy", Images(pixels, labels), Images(pixels, labels), ("a", "b", "c"), False, (0.5,), (0.5,))
    sample = take_share(source, 0.3)
    assert np.bincount(sample.train.labels).tolist() == [30, 6, 1]
    rows = sample.train.images.ravel()
    assert (np.diff(rows.astype(int)) > 0).all(), "in their old order"
    assert (labels[rows] == sample.train.labels).all()
    assert sample.test is source.test
    assert (take_share(source, 0.3).train.images == sample.train.images).all()
    assert set(rows.tolist()) < set(take_share(source, 0.6).train.images.ravel().tolist())
    assert take_share(source, 1) is source
