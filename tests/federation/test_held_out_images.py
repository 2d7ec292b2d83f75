"""Folders of test images of a federation: what is wrong with them is stated, and no image is left out silently."""

from pathlib import Path

import pytest
from PIL import Image
from support.image_files import make_noise_images

from halfmoon.core.errors import UserError
from halfmoon.data import Images
from halfmoon.federation.protocol.messages import RefusalError
from halfmoon.federation.protocol.terms import describe_held_out
from halfmoon.federation.server.plan import load_plan
from halfmoon.federation.server.server import FederationServer
from halfmoon.sites.folders import read_site

FEDERATION = """
data = "digits"
method = "fedavg"
network = "small"
width = 4
rounds = 1
cohort = 1
[federation]
name = "marked"
sites = ["ward"]
classes = ["a", "b"]
image = [3, 8, 8]
mirror = false
mean = [0.3, 0.3, 0.3]
std = [0.4, 0.4, 0.4]
test = "test"
"""


def write_folder(folder: Path, labels: str = "ab", seed: int = 0) -> Path:
    folder.mkdir()
    images = make_noise_images(6, 8, seed=seed)
    for row, pixels in enumerate(images):
        Image.fromarray(pixels).save(folder / f"{row}.png")
    lines = [f"{row}.png,{labels[row % 2]}" for row in range(6)]
    (folder / "labels.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    return folder


def test_unreadable_and_shared_images_are_stated(tmp_path: Path) -> None:
    """They were left out, or measured on, without a word."""
    train = make_noise_images(6, 8)
    labels = read_site(write_folder(tmp_path / "first")).labels
    write_folder(tmp_path / "second")
    first = Images(train[:4], labels[:4])  # two images cannot be read
    notes = describe_held_out(
        {tmp_path / "first": first, tmp_path / "second": Images(train[2:], labels[2:])}, train[:1]
    )
    assert [note.partition(str(tmp_path))[0] for note in notes] == [
        "2 of 6 labeled images in ",
        "1 of 4 images in ",
        "2 of 6 labeled images in ",
        "2 of 4 images in ",
    ]
    assert "are training images as well" in notes[1]
    assert f"are images in {tmp_path / 'first'} as well" in notes[3]
    write_folder(tmp_path / "third", seed=1)
    assert describe_held_out({tmp_path / "third": Images(make_noise_images(6, 8, seed=1), labels)}, train) == []


def test_a_server_names_the_folder_with_other_classes(tmp_path: Path) -> None:
    """The message was that for the server of another machine: "it has labels ...; its log names them"."""
    (tmp_path / "federation.toml").write_text(FEDERATION)
    write_folder(tmp_path / "test", "az")
    with pytest.raises(
        UserError, match=r"test has labels of classes that federation marked does not have: z"
    ) as caught:
        FederationServer(load_plan(tmp_path / "federation.toml"), tmp_path / "run").prepare()
    assert not isinstance(caught.value, RefusalError)
