"""Predictions for pages: the same as `Model.probabilities`, with the features that its head is given."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from halfmoon.models import SmallCNN
from halfmoon.pages.background_prediction import BackgroundPrediction, predict_images
from halfmoon.sites.inference import Card, InferenceModel

draw = np.random.default_rng(0)


def model(temperature: float = 1.0, norm: str = "batch") -> InferenceModel:
    network = SmallCNN(1, 3, 4, norm)  # pyright: ignore
    held = network.init(torch.Generator().manual_seed(0))
    card = Card(("a", "b", "c"), (1, 8, 8), (8, 8), 1, (0.4,), (0.3,), network, "m", "")
    return InferenceModel(replace(card, temperature=temperature), held["params"], held["stats"], torch.device("cpu"))


@pytest.mark.parametrize(("temperature", "norm"), [(1.0, "batch"), (2.5, "group"), (1.0, "none")])
def test_the_probabilities_are_those_of_predict(temperature: float, norm: str):
    one = model(temperature, norm)
    images = draw.integers(0, 256, (7, 8, 8, 1), np.uint8)
    logits, features = one.represent(images)
    assert np.array_equal(one.to_probabilities(logits), one.probabilities(images))
    assert features.shape == (7, 8)
    head = one.params["head"]
    logits = features @ head["weight"].numpy().T + (head["bias"].numpy() if "bias" in head else 0)
    assert logits == pytest.approx(one.logits(images), abs=1e-5)


def test_an_image_that_cannot_be_read_is_unknown(tmp_path: Path):
    for n in range(3):
        Image.fromarray(draw.integers(0, 256, (9, 9), np.uint8)).save(tmp_path / f"{n}.png")
    (tmp_path / "1.png").write_bytes(b"no image")
    found = predict_images(model(), tmp_path, ["0.png", "1.png", "2.png"])
    assert list(found.mask) == [True, False, True]
    assert list(found.predicted >= 0) == [True, False, True]


def test_background_prediction_reports_errors_and_progress(tmp_path: Path):
    Image.new("L", (8, 8)).save(tmp_path / "0.png")

    def broken() -> InferenceModel:
        raise ValueError("no such model")

    failed = BackgroundPrediction(broken, tmp_path, ["0.png"])
    failed.start()
    failed.wait()
    assert (failed.result, failed.error) == (None, "no such model")
    done = BackgroundPrediction(model, tmp_path, ["0.png"])
    done.start()
    done.wait()
    assert done.result is not None
    assert (done.count, done.classes, done.error) == (1, ("a", "b", "c"), "")
