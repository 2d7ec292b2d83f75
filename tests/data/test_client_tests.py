"""Test images are dealt to clients by the class mix of their training images."""

import numpy as np

from halfmoon.data.partition.client_tests import NO_CLIENT, deal_test_images
from halfmoon.data.partition.split import SERVER, Split


def test_each_class_is_dealt_in_proportion_to_training_images():
    """Clients have 6 and 2 images of class 0, and 0 and 3 of class 1: of eight and four test images, 6, 2, 0 and 4."""
    client = np.array([0] * 6 + [1] * 2 + [1] * 3 + [SERVER, -1])
    labels = np.array([0] * 8 + [1] * 3 + [2, 2])
    labeled = np.zeros(len(client), bool)
    labeled[[0, 9, -2]] = True
    tests = np.array([2, *[0, 1, 0] * 4])
    owners = deal_test_images(Split(client, labeled, clients=2), labels, tests, classes=3)
    assert np.bincount(owners[tests == 0]).tolist() == [6, 2]
    assert owners[tests == 1].tolist() == [1, 1, 1, 1]
    # Only the server and no client have class 2.
    assert owners[0] == NO_CLIENT


def test_unknown_labels_do_not_count():
    split = Split(np.array([0, 0, 1]), np.array([True, False, True]), clients=2)
    owners = deal_test_images(split, np.array([0, -1, 0]), np.zeros(4, np.int64), classes=1)
    assert np.bincount(owners).tolist() == [2, 2]
