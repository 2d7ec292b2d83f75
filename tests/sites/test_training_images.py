"""A model recognizes the images that it was trained on, in any folder: calibrate refuses, evaluate warns."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.image_files import make_noise_images

import halfmoon
from halfmoon import UserError
from halfmoon.cli.main import main
from halfmoon.storage.image_digests import DIGESTS, load_digests, write_digests


def write_classes(folder: Path, count: int, seed: int) -> None:
    for number, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for row, pixels in enumerate(make_noise_images(count, 12, seed=2 * seed + number)):
            Image.fromarray(pixels).save(folder / name / f"{seed}-{row}.png")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_classes(tmp_path / "in" / "train", 8, seed=0)
    write_classes(tmp_path / "in" / "test", 4, seed=1)
    options = {
        "clients": 2,
        "labels": 8,
        "setting": "iid-iid",
        "network": "small",
        "rounds": 1,
        "baselines": ["fedavg-sl"],
    }
    halfmoon.run(method="fedavg", data=str(tmp_path / "in"), run_dir=tmp_path / "out", resize=10, **options)
    return tmp_path


def test_copies_of_training_images_are_recognized(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(run / "new", 4, seed=2)
    write_classes(run / "mixed", 4, seed=2)
    (run / "mixed" / "cat" / "copy.png").write_bytes((run / "in" / "train" / "cat" / "0-3.png").read_bytes())
    for model in (run / "out", run / "out" / "baselines" / "fedavg-sl"):
        assert main(["calibrate", str(model), str(run / "mixed")]) == 2
        assert "the model was trained on 1 of these 9 images" in capsys.readouterr().err
        assert main(["evaluate", str(model), str(run / "mixed")]) == 0
        assert "mixed (1 of 9) has the images that the model was trained on" in capsys.readouterr().err
        assert main(["evaluate", str(model), str(run / "new")]) == 0
        assert "trained on" not in capsys.readouterr().err
        assert main(["evaluate", str(model), str(run / "in" / "test")]) == 0
        assert "trained on" not in capsys.readouterr().err
    assert main(["calibrate", str(run / "out"), str(run / "new")]) == 0
    with pytest.raises(UserError, match="trained on 1 of these 9"):
        halfmoon.load_model(run / "out").calibrate(run / "mixed")


def test_digests_have_a_key_of_their_own(tmp_path: Path) -> None:
    images = make_noise_images(3, 4)
    for name in ("a", "b"):
        write_digests(tmp_path / name, images)
    contents = [(tmp_path / name / DIGESTS).read_bytes() for name in ("a", "b")]
    chunks = [{data[start : start + 16] for start in range(0, len(data), 16)} for data in contents]
    assert not chunks[0] & chunks[1]
    known = load_digests(tmp_path / "a" / "model.safetensors")
    assert known is not None
    assert known.count(np.concatenate([images, make_noise_images(5, 4, seed=1)])) == 3
    assert load_digests(None) is None
