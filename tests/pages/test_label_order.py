"""The order of images to label: oracles are hand-made points, and what an order may never depend on."""

import numpy as np
import pytest

from halfmoon.pages.label_order import (
    Predictions,
    find_randomly_labeled,
    mix_in_random,
    order_for_labeling,
    rank_descending,
    shuffle_rows,
    sort_by_similarity,
    standardize,
)

draw = np.random.default_rng(0)


def made(count: int = 40, classes: int = 3, width: int = 5) -> Predictions:
    raw = draw.random((count, classes)) ** 3
    return Predictions(raw / raw.sum(1, keepdims=True), draw.normal(size=(count, width)).astype(np.float32))


def no_labels(count: int) -> np.ndarray:
    return np.full(count, -1)


def test_uncertainty_is_one_minus_the_margin():
    """The most uncertain has rank 1, the unknown none."""
    found = Predictions(np.array([[0.5, 0.5, 0], [1, 0, 0], [0.7, 0.1, 0.2]]), np.zeros((3, 1))).uncertainty
    assert found == pytest.approx([1, 0, 0.5])
    assert rank_descending(np.array([0.2, 0.9, np.nan, 0.5])).tolist() == [3, 1, 0, 2]


def test_order_has_every_unlabeled_row_once():
    predictions = made()
    predictions.probabilities[[3, 8]] = np.nan
    labels = no_labels(40)
    labels[[1, 2, 5]] = [0, 1, 2]
    found = order_for_labeling(predictions, labels, labels < 0, greedy_images=7)
    assert sorted(found) == sorted(set(range(40)) - {1, 2, 5})
    assert set(found[-2:]) == {3, 8}  # what the model could not see comes last


def test_equal_images_are_not_adjacent():
    """Nine copies of the most uncertain image and nine others: one copy is picked, then all the others."""
    probabilities = np.array([[0.5, 0.5]] * 9 + [[0.7, 0.3]] * 9)
    features = np.concatenate([np.zeros((9, 2)), np.arange(1, 19).reshape(9, 2)]).astype(np.float32)
    found = order_for_labeling(Predictions(probabilities, features), no_labels(18), np.ones(18, bool), greedy_images=10)
    assert sum(row < 9 for row in found[:10]) == 1


def test_neighbors_of_a_labeled_image_are_later():
    """Two clusters with equal uncertainty; the one with a label is second."""
    features = np.concatenate([draw.normal(0, 0.01, (5, 2)), draw.normal(9, 0.01, (5, 2))])
    labels = no_labels(10)
    labels[0] = 0
    found = order_for_labeling(Predictions(np.full((10, 2), 0.5), features), labels, labels < 0)
    assert found[0] >= 5


def test_class_with_fewest_labels_is_first_and_classes_take_turns():
    predictions = made(60)
    predicted = predictions.predicted
    labels = no_labels(60)
    labels[np.flatnonzero(predicted == 0)[:3]] = 0
    labels[np.flatnonzero(predicted == 1)[:3]] = 1
    found = order_for_labeling(predictions, labels, labels < 0)
    assert list(predicted[found[:3]]) == [2, 2, 2]
    assert sorted(predicted[found[3:6]]) == [0, 1, 2]


def test_images_after_the_greedy_ones_are_ordered_by_uncertainty():
    predictions = made(50)
    found = order_for_labeling(predictions, no_labels(50), np.ones(50, bool), greedy_images=10)
    rest = predictions.uncertainty[found[10:]]
    assert (np.diff(rest) <= 0).all()


def test_the_same_folder_gives_the_same_order():
    predictions = made()
    open_ = np.ones(40, bool)
    assert (
        order_for_labeling(predictions, no_labels(40), open_) == order_for_labeling(predictions, no_labels(40), open_)
    ).all()
    assert (shuffle_rows(open_, 1) == shuffle_rows(open_, 1)).all()
    assert (shuffle_rows(open_, 1) != shuffle_rows(open_, 2)).any()

    before = shuffle_rows(open_)
    open_[before[4]] = False  # a reply takes its image out of a random order, and no other
    assert list(shuffle_rows(open_)) == [row for n, row in enumerate(before) if n != 4]


def test_order_without_images_or_with_one_class():
    assert len(order_for_labeling(made(), no_labels(40), np.zeros(40, bool))) == 0
    one = Predictions(np.ones((4, 1)), np.zeros((4, 1)))
    assert sorted(order_for_labeling(one, no_labels(4), np.ones(4, bool))) == [0, 1, 2, 3]


def test_features_are_standardized_over_the_mask():
    features = np.array([[1.0, 5], [3, 5], [99, 7]])
    found = standardize(features, np.array([True, True, False]))
    assert found.tolist() == [[-1, 0], [1, 0], [0, 0]]


def test_similar_rows_are_sorted_by_distance_with_unknown_ones_last():
    predictions = Predictions(np.full((4, 2), 0.5), np.array([[0, 0], [3, 4], [np.nan, 0], [0, 2]], np.float32))
    predictions.probabilities[2] = np.nan
    assert sort_by_similarity(predictions, 1).tolist() == [1, 3, 0, 2]


def test_every_fifth_is_the_next_of_the_random_order():
    chosen = np.arange(12)
    random = np.array([11, 0, 3, 7, 2, 1, 10, 4, 5, 6, 8, 9])
    assert mix_in_random(chosen, random).tolist() == [0, 1, 2, 3, 11, 4, 5, 6, 7, 10, 8, 9]


def test_labels_of_chosen_images_are_not_a_random_sample():
    """The first 20 of the random order have a label or are undecided, except one; 30 later ones were picked."""
    first = shuffle_rows(np.ones(400, bool), 3)
    labels = no_labels(400)
    passed = np.zeros(400, bool)
    labels[first[:19]], passed[first[19]] = 1, True
    labels[first[4]] = -1
    labels[first[200:230]] = 2
    found = find_randomly_labeled(labels, passed, 3)
    assert sorted(np.flatnonzero(found)) == sorted(set(first[:19]) - {first[4]})
    assert not find_randomly_labeled(no_labels(5), np.zeros(5, bool)).any()
