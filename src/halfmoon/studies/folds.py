"""Split images into labeled, unlabeled and test rows: folds of a cross-validation, and draws of the labels."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from halfmoon.data.groups import drop_shared_groups
from halfmoon.data.partition.primitives import GroupHoldout, named_generator

FOLDS = 5
"""Folds of a cross-validation."""

REPEATS = 10
"""Repetitions of a cross-validation of few labels, each with other folds."""

MANY_LABELS = 300
"""Labels above which `FEW_REPEATS` suffice: one repetition tests as many images as ten of 30 labels, and takes longer."""

FEW_REPEATS = 3
"""Repetitions of a cross-validation of many labels."""

DRAWS = 10
"""Draws of the labels in a folder whose labels are all known."""


class Fold(NamedTuple):
    """The rows of one split, int64 each."""

    labeled: np.ndarray
    unlabeled: np.ndarray
    test: np.ndarray


def cross_validation_folds(
    labels: np.ndarray, groups: Sequence[str] | None = None, repeats: int | None = None
) -> Iterator[Fold]:
    """Yield the folds of repeated cross-validations of the labeled rows, stratified by class.

    Each class holds out the same number of labels in every fold: a fifth of them, rounded down, and at least one. So no
    fold changes how frequent a class is among the labels, beyond this rounding. A class of fewer labels than folds holds
    out some of them twice in a repetition; of a class whose number of labels is no multiple of the folds, another
    remainder remains in training in every repetition. A class with one label is always in training.

    A row takes its whole group along: no row of a test group, labeled or not, is trained on.

    Args:
        labels: int64 (N,), negative for an unlabeled row.
        groups: the patient or group of each row; "" for none.
        repeats: the number of repetitions; None to choose it by the number of labels (`count_repeats`).
    """
    labeled_count = int((labels >= 0).sum())
    for repeat in range(count_repeats(labeled_count) if repeats is None else repeats):
        orders = _shuffle_classes(labels, repeat)  # the rows of each class with two or more labels
        fold_of_group: dict[str, int] = {}  # filled by `_keep_groups_together` as folds take the groups
        for number in range(FOLDS):
            held_out = [_select_block(order, number) for order in orders]
            no_rows = np.arange(0)
            test_rows = np.sort(np.concatenate(held_out)) if held_out else no_rows
            if groups is not None:
                test_rows = _keep_groups_together(test_rows, labels, groups, fold_of_group, number)
            is_labeled = labels >= 0
            is_labeled[test_rows] = False
            labeled = drop_shared_groups(np.flatnonzero(is_labeled), test_rows, groups)
            unlabeled = drop_shared_groups(np.flatnonzero(labels < 0), test_rows, groups)
            if len(test_rows) and len(labeled):
                yield Fold(labeled, unlabeled, test_rows)


def count_repeats(labeled: int) -> int:
    """Choose the repetitions of a cross-validation of so many labels."""
    return min(REPEATS, FEW_REPEATS) if labeled > MANY_LABELS else REPEATS


def _shuffle_classes(labels: np.ndarray, repeat: int) -> list[np.ndarray]:
    """Shuffle the labeled rows of each class that has two or more, int64 each."""
    orders: list[np.ndarray] = []
    for label in np.unique(labels[labels >= 0]):
        rows = np.flatnonzero(labels == label)
        if len(rows) > 1:
            orders.append(named_generator(0, "folds", str(repeat), str(label)).permutation(rows))
    return orders


def _select_block(order: np.ndarray, number: int) -> np.ndarray:
    """Select the block of a class's rows that fold `number` holds out; it continues at the start after the last row."""
    size = max(1, len(order) // FOLDS)
    return order[np.arange(number * size, (number + 1) * size) % len(order)]


def _keep_groups_together(
    test_rows: np.ndarray, labels: np.ndarray, groups: Sequence[str], fold_of_group: dict[str, int], number: int
) -> np.ndarray:
    """Move every group, such as the images of a patient, into the fold that first holds out one of its rows.

    No group is in training and test at once: a model would recognize the patient.

    Args:
        test_rows: the rows that fold `number` holds out, int64.
        labels: int64 (N,), negative for an unlabeled row.
        groups: the patient or group of each row; "" for none.
        fold_of_group: the fold of each group of this repetition so far; updated in place.
        number: the fold.

    Returns:
        The labeled rows to hold out: those without a group, and all of the groups of this fold.
    """
    held_out: list[int] = test_rows.tolist()
    for row in held_out:
        if groups[row]:
            fold_of_group.setdefault(groups[row], number)  # a group that an earlier fold holds out remains there
    single = [row for row in held_out if not groups[row]]
    labeled: list[int] = np.flatnonzero(labels >= 0).tolist()
    members = [row for row in labeled if fold_of_group.get(groups[row], -1) == number]
    return np.array(sorted({*single, *members}), np.int64)


def label_draws(
    labels: np.ndarray,
    counts: Sequence[int],
    test_rows: np.ndarray | None = None,
    groups: Sequence[str] | None = None,
) -> Iterator[Fold]:
    """Yield `DRAWS` splits of rows whose labels are all known; the labels of most training rows are hidden in each.

    So the methods are compared on other choices of the labeled images. The draws are the same on every call.

    Args:
        labels: int64 (N,).
        counts: for each class, the number of training rows that keep their label; the others are unlabeled.
        test_rows: the rows to test on; None for a fifth of each class, drawn each time, with all rows of their groups.
        groups: the patient or group of each row; "" for none.
    """
    group_names = groups or [""] * len(labels)
    for number in range(DRAWS):
        labeled: list[np.ndarray] = []
        unlabeled: list[np.ndarray] = []
        tested: list[np.ndarray] = []
        sides = GroupHoldout()  # remembers for all classes which groups are in the test
        for label, count in enumerate(counts):
            rows = named_generator(0, "draws", str(number), str(label)).permutation(np.flatnonzero(labels == label))
            class_tests = sides.draw(rows, group_names, len(rows) // FOLDS) if test_rows is None else test_rows
            is_test = np.isin(rows, class_tests)
            tested.append(rows[is_test])
            labeled.append(rows[~is_test][:count])
            unlabeled.append(rows[~is_test][count:])
        yield Fold(
            labeled=np.sort(np.concatenate(labeled)),
            unlabeled=np.sort(np.concatenate(unlabeled)),
            test=np.sort(np.concatenate(tested)),
        )
