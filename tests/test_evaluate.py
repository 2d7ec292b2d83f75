"""Accuracy and pseudo-label quality against plain counting in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scenes import CLASSES, examples, task
from torch_models import TorchSmall, twin

from halfmoon import rng, tree
from halfmoon.evaluate import Examples, Quality, scores
from halfmoon.models import track
from halfmoon.types import Pseudo


def model():
    """Return a random model with the statistics of the images and logits around zero: it says all classes of them."""
    shared = task()
    made = tree.to(shared.network.init(rng.generator(4, "evaluate")), dtype=torch.float64)
    images = shared.normalize(examples(50, seed=8).images)
    for _ in range(40):
        _, moments = shared.network.train(made["params"], images)
        made["stats"] = track(made["stats"], moments)
    made["params"]["head"]["bias"] -= shared.network.predict(made["params"], made["stats"], images).mean(0)
    return made


@pytest.mark.parametrize("batch", [1, 7, 50, 1000])
def test_scores_equal_a_count(batch):
    """Accuracy, loss and class-wise accuracy of 50 images equal the module's in eval mode, however they are cut."""
    test = examples(50, seed=8)
    shared = task()
    made = scores(shared.network, model(), shared.normalize, test, batch)
    oracle = twin(TorchSmall(1, CLASSES, shared.network.width), model()).eval()
    with torch.no_grad():
        logits = oracle(test.images.double() / 127.5 - 1).numpy()
    labels = test.labels.numpy()
    right = logits.argmax(1) == labels
    chance = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert made["accuracy"] == right.mean()
    assert made["loss"] == pytest.approx(-np.log(chance[np.arange(50), labels]).mean(), rel=1e-10)
    assert made["per_class"] == [round(right[labels == k].mean(), 6) for k in range(CLASSES)]
    assert len(set(logits.argmax(1))) == CLASSES
    assert 0 < made["accuracy"] < 1


def test_a_class_without_test_images_scores_zero():
    """It has no accuracy of its own, and the others are not disturbed."""
    test = examples(30, seed=8)
    without = Examples(test.images, test.labels.clamp_max(CLASSES - 2))
    made = scores(task().network, model(), task().normalize, without)
    assert len(made["per_class"]) == CLASSES
    assert made["per_class"][-1] == 0


def test_quality_equals_a_count():
    """Over 40 random batches: accuracy, accuracy and share above the threshold, of those used, and by class."""
    random = np.random.default_rng(0)
    quality = Quality(CLASSES, 0.7, torch.device("cpu"))
    label, hidden, confidence, weight = [], [], [], []
    for size in random.integers(1, 9, 40):
        label.append(random.integers(0, CLASSES, size))
        hidden.append(random.integers(0, CLASSES - 1, size))  # the last class is never there
        confidence.append(random.choice([0.3, 0.7, 0.9], size))
        weight.append(random.choice([0.0, 0.2, 1.0], size))
        pseudo = Pseudo(*(torch.from_numpy(each[-1]) for each in (label, confidence, weight)))
        quality.add(pseudo, torch.from_numpy(hidden[-1]))
    label, hidden, confidence, weight = (np.concatenate(each) for each in (label, hidden, confidence, weight))
    right, above, used = label == hidden, confidence >= 0.7, weight > 0
    row = quality.row()
    assert row is not None
    assert row["accuracy"] == pytest.approx(right.mean(), rel=1e-12)
    assert row["share_above"] == pytest.approx(above.mean(), rel=1e-12)
    assert row["accuracy_above"] == pytest.approx(right[above].mean(), rel=1e-12)
    assert row["share_used"] == pytest.approx(used.mean(), rel=1e-12)
    assert row["accuracy_used"] == pytest.approx(right[used].mean(), rel=1e-12)
    assert row["per_class"][:-1] == pytest.approx([right[hidden == k].mean() for k in range(CLASSES - 1)], rel=1e-12)
    assert row["per_class"][-1] is None


def test_quality_of_nothing_is_none():
    """No pseudo-label: no row. None above the threshold or used: no accuracy of those, a share of 0."""
    quality = Quality(CLASSES, 0.95, torch.device("cpu"))
    assert quality.row() is None
    quality.add(Pseudo(torch.tensor([1, 2]), torch.tensor([0.5, 0.6]), torch.tensor([0.0, 0.0])), torch.tensor([1, 1]))
    row = quality.row()
    assert row is not None
    assert row["accuracy"] == 0.5
    assert row["accuracy_above"] is None
    assert row["accuracy_used"] is None
    assert row["share_above"] == row["share_used"] == 0
