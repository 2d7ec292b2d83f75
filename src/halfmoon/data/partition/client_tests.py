"""Deal a data set's test images to clients, so that each client's accuracy can be measured on its class mix."""

import numpy as np

from halfmoon.data.partition.heterogeneity import count_rows
from halfmoon.data.partition.primitives import apportion, named_generator
from halfmoon.data.partition.split import Split

NO_CLIENT = -1
"""The client number of a test image whose class no client has."""


def deal_test_images(split: Split, train_labels: np.ndarray, test_labels: np.ndarray, classes: int) -> np.ndarray:
    """Deal test images to clients in proportion to the class mix of their training images.

    The test images of each class are divided among the clients in proportion to their training images of this class,
    labeled or not, by largest remainders. So each test image belongs to one client, as in PFLlib, where a client's
    images are divided into training and test images after the partition. The result depends on the split and the
    labels only: all methods and seeds of a comparison have the same test shares.

    Args:
        split: the client of each training image.
        train_labels: labels of the training images, int64 (N,); unknown labels are not counted.
        test_labels: labels of the test images, int64 (M,).
        classes: the number of classes.

    Returns:
        The client of each test image, int64 (M,); `NO_CLIENT` if no client has training images of its class.
    """
    labeled, unlabeled = count_rows(split, train_labels, classes)
    counts = labeled + unlabeled
    client_of_row = np.full(len(test_labels), NO_CLIENT, np.int64)
    for label in range(classes):
        if not counts[:, label].any():
            continue
        rows = np.flatnonzero(test_labels == label)
        # Files may be sorted, by patient for example, so the order within a class is random.
        shuffled = named_generator(0, "client-tests", str(label)).permutation(rows)
        rows_per_client = apportion(counts[:, label], len(rows))
        client_of_row[shuffled] = np.repeat(np.arange(split.clients), rows_per_client)
    return client_of_row
