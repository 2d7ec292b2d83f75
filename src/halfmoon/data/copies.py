"""Images with equal pixels in the train and test images of a data set."""

from dataclasses import replace

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data.groups import describe_equal_images, describe_only_equal_images, hash_pixels, merge_equal_images
from halfmoon.data.images import Images


def group_copies(train: Images, tests: Images) -> tuple[Images, Images, list[str]]:
    """Assign images with equal pixels to one group, as copies must not be on different sides of a later split.

    A copy in both train and test remains in both, with a warning: the folders of the user divide them.

    Returns:
        Training and test images with their groups, and sentences for the user about copies.

    Raises:
        UserError: All training images are equal.
    """
    hashes = [*hash_pixels(train.images), *hash_pixels(tests.images)]
    notes = describe_equal_images(hashes, np.concatenate([train.labels, tests.labels]))
    if not notes:
        return train, tests, []
    if len(train) > 1 and len(set(hashes[: len(train)])) == 1:
        raise UserError(f"{describe_only_equal_images(f'{len(train):,} training images')}.")
    if train.groups is None and tests.groups is None:
        groups = None
    else:
        groups = [*(train.groups or [""] * len(train)), *(tests.groups or [""] * len(tests))]
    merged = merge_equal_images(groups, hashes)
    train_hashes = set(hashes[: len(train)])
    shared = sum(image_hash in train_hashes for image_hash in hashes[len(train) :])
    if shared:
        # Only folders that divide the images themselves can have copies on both sides. The first note then must not end
        # with the clause that all copies are on one side.
        notes[0] = notes[0].partition(": all copies")[0]
        notes.append(
            f"{shared:,} of {len(tests):,} test images are training images as well, so the accuracy is too high: remove "
            "them from one of the two"
        )
    assert merged is not None, "there are copies"
    train_groups = merged[: len(train)]
    test_groups = merged[len(train) :]
    return replace(train, groups=train_groups), replace(tests, groups=test_groups), notes
