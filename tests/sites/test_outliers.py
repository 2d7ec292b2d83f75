"""Images that look unlike what a model knows: how many of the like of a folder are called so, and that others are."""

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import halfmoon
from halfmoon.cli import main as cli
from halfmoon.core.errors import UserError
from halfmoon.data import load
from halfmoon.sites.inference import load_model
from halfmoon.sites.inference.outliers import (
    EXPECTED_OUTLIER_SHARE,
    ReferenceImages,
    build_reference,
    too_many_outliers,
)

SOURCE = load("digits")


def folder(path: Path, images: np.ndarray) -> Path:
    path.mkdir()
    for n, pixels in enumerate(images):
        Image.fromarray(pixels[:, :, 0]).save(path / f"{n:03}.png")
    return path


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, images that it has not seen in two halves, and one of these as negatives."""
    path = tmp_path_factory.mktemp("unlike")
    shared = {"method": "fedavg-sl", "rounds": 10, "lr": 0.01, "threads": 1, "clients": 4, "cohort": 4, "steps": 10}
    halfmoon.run(halfmoon.Config(**shared, budget="none", run_dir=path / "run"))
    held = SOURCE.test.images
    folder(path / "known", held[::2])
    folder(path / "others", held[1::2])
    folder(path / "negative", 255 - held[1::2])
    folder(path / "few", held[:39])
    return path


def test_the_limit_is_the_distance_that_one_of_twenty_exceeds(image_folder: Path):
    found = build_reference(load_model(image_folder / "run"), image_folder / "known")
    far = 2 - 2 * np.sort(found.features @ found.features.T, axis=1)[:, -6]
    assert np.mean(far > found.limit) == pytest.approx(EXPECTED_OUTLIER_SHARE, abs=0.01)
    assert ReferenceImages(found.features, found.limit).find_outliers(7 * found.features[far <= found.limit]).sum() == 0


def test_predict_warns_of_negatives_and_not_of_others(image_folder: Path, capsys: pytest.CaptureFixture[str]):
    shares = {}
    for name in ("others", "negative"):
        out = image_folder / f"{name}.csv"
        flags = ["--like", str(image_folder / "known"), "--out", str(out)]
        assert cli.main(["predict", str(image_folder / "run"), str(image_folder / name), *flags]) == 0
        rows = list(csv.DictReader(out.open()))
        shares[name] = np.mean([row["unlike"] == "yes" for row in rows])
        warned = "do not rely on their labels" in capsys.readouterr().err
        assert warned == (name == "negative")
    assert shares["others"] < 0.12
    assert shares["negative"] > 0.3


def test_few_images_tell_nothing(image_folder: Path):
    with pytest.raises(
        UserError, match="has 39 images that can be read: finding images that do not resemble them needs 40"
    ):
        build_reference(load_model(image_folder / "run"), image_folder / "few")


def test_many_are_more_than_chance_brings():
    """Of 100 images 5 are expected; 16 or more come in one of 27,000 folders, 13 or more in one of 680."""
    assert [too_many_outliers(count, 100) for count in (0, 5, 13, 16)] == [False, False, False, True]
