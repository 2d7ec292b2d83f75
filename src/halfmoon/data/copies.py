"""Images with equal pixels in the train and test images of a data set."""

from dataclasses import replace

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data.groups import describe_equal_images, describe_only_equal_images, hash_pixels, merge_equal_images
from halfmoon.data.images import Images
from halfmoon.data.near_duplicates import describe_near_duplicates, find_near_duplicates, join_near_duplicates


def group_copies(train: Images, tests: Images) -> tuple[Images, Images, list[str]]:
    """Assign equal images and near-duplicates to one group, as copies must not be on different sides of a later split.

    A copy in both train and test remains in both, with a warning: the folders of the user divide them.

    Returns:
        Training and test images with their groups, and sentences for the user about copies.

    Raises:
        UserError: All training images are equal.
    """
    train_hashes = hash_pixels(train.images)
    test_hashes = hash_pixels(tests.images)
    different_train_hashes = set(train_hashes)
    in_both = sum(image_hash in different_train_hashes for image_hash in test_hashes)
    hashes = [*train_hashes, *test_hashes]
    labels = np.concatenate([train.labels, tests.labels])
    notes = describe_equal_images(hashes, labels, split_keeps_copies=not in_both)
    pairs = find_near_duplicates((train.images, tests.images), hashes)
    near_notes = describe_near_duplicates(pairs, len(train), len(tests))
    if not notes and not near_notes:
        return train, tests, []
    if len(train) > 1 and len(different_train_hashes) == 1:
        raise UserError(f"{describe_only_equal_images(f'{len(train):,} training images')}.")
    if in_both:
        notes.append(
            f"{in_both:,} of {len(tests):,} test images are training images as well, so the accuracy is too high: remove "
            "them from one of the two"
        )
    notes += near_notes
    groups = merge_equal_images(_join_groups(train, tests), join_near_duplicates(pairs, hashes))
    if groups is None:
        return train, tests, notes
    train = replace(train, groups=groups[: len(train)])
    tests = replace(tests, groups=groups[len(train) :])
    return train, tests, notes


def _join_groups(train: Images, tests: Images) -> list[str] | None:
    """List the groups of training and then of test images, "" for none; None if no image has a group."""
    if train.groups is None and tests.groups is None:
        return None
    return [*(train.groups or [""] * len(train)), *(tests.groups or [""] * len(tests))]
