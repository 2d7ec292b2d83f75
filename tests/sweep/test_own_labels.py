"""The head of a folder that is being labeled: what is left out, and what the page says of more labels."""

import numpy as np
import pytest

from halfmoon.sweeps.decision import Fold
from halfmoon.sweeps.own_labels import Point, half


def test_half_of_the_labels_of_each_class_become_unknown():
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 2, -1, -1, 0])
    fold = Fold(np.arange(8), np.array([8, 9]), np.array([10]))
    found = half(fold, labels, 3)
    assert np.bincount(labels[found.labeled]).tolist() == [2, 2, 1]
    assert sorted([*found.labeled, *found.unlabeled]) == list(range(10))
    assert (list(found.test), list(found.labeled)) == ([10], list(half(fold, labels, 3).labeled))


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        ((0.5, -1.0, 1.9), "More labels hardly help"),
        ((0.5, -1.0, 2.0), "Label more to see"),
        ((3.0, 0.1, 6.0), "More labels help"),
    ],
)
def test_more_labels_hardly_help_where_two_points_are_ruled_out(gain: tuple[float, float, float], words: str):
    assert Point(100, 100, 100, 80.0, 70.0, 90.0, *gain).advice.startswith(words)
