"""Near-duplicates of pictures, at another size or compression, are on one side of a split or counted."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halfmoon.data import load, near_duplicates
from halfmoon.data.conversion import make_memory_data
from halfmoon.data.groups import hash_pixels
from halfmoon.data.memory import load_memory, register
from halfmoon.data.near_duplicates import describe_near_duplicates, find_near_duplicates, join_near_duplicates
from halfmoon.data.preparation import Preparation


def make_pictures(count: int, side: int = 64, seed: int = 0) -> list[Image.Image]:
    """Make smooth pictures: noise of 8x8 pixels, enlarged."""
    noise = np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), np.uint8)
    return [Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC) for pixels in noise]


def compress(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


COPIES = {
    "smaller": lambda image: image.resize((40, 40), Image.Resampling.BILINEAR).resize((64, 64)),
    "compressed": lambda image: compress(image, 60),
    "a pixel a row": lambda image: Image.fromarray(np.asarray(image) ^ np.eye(64, dtype=np.uint8)[:, :, None]),
}
OTHERS = {
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "cropped": lambda image: image.crop((8, 8, 56, 56)).resize((64, 64)),
    "other colors": lambda image: Image.fromarray(np.asarray(image)[..., ::-1]),
    "darker": lambda image: Image.fromarray((np.asarray(image) * 0.8).astype(np.uint8)),
}


@pytest.mark.parametrize("kind", [*COPIES, *OTHERS])
def test_only_the_same_picture_is_a_near_duplicate(kind: str) -> None:
    pictures = make_pictures(6)
    changed = [{**COPIES, **OTHERS}[kind](picture) for picture in pictures]
    images = np.stack([np.asarray(picture) for picture in [*pictures, *changed]])
    pairs = find_near_duplicates([images[:6], images[6:]], hash_pixels(images))
    assert pairs.tolist() == ([[row, row + 6] for row in range(6)] if kind in COPIES else [])


def test_noise_constant_and_tiny_images_are_no_near_duplicates() -> None:
    generator = np.random.default_rng(0)
    for images in (
        generator.integers(0, 256, (50, 32, 32, 3), np.uint8),
        np.repeat(np.arange(50, dtype=np.uint8), 32 * 32).reshape(50, 32, 32, 1),
        generator.integers(100, 103, (50, 32, 32, 1), np.uint8),
        np.repeat(np.asarray(make_pictures(1, 8)[0])[None], 9, 0) + np.arange(9, dtype=np.uint8)[:, None, None, None],
    ):
        assert len(find_near_duplicates([images], hash_pixels(images))) == 0


def test_the_same_images_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is searched when it is divided into train and test, and again when its copies are grouped."""
    pictures = make_pictures(6, seed=7)
    images = np.stack([np.asarray(picture) for picture in [*pictures, COPIES["smaller"](pictures[4])]])
    comparisons: list[int] = []
    compare = near_duplicates._compare_images
    monkeypatch.setattr(near_duplicates, "_compare_images", lambda *images: comparisons.append(1) or compare(*images))
    first = find_near_duplicates([images[:4], images[4:]], hash_pixels(images))
    first[:] = -1  # a caller's change has no effect on the next result
    assert find_near_duplicates([images[:5], images[5:]], hash_pixels(images)).tolist() == [[4, 6]]
    assert len(comparisons) == 1
    other_order = images[::-1]
    assert find_near_duplicates([other_order], hash_pixels(other_order)).tolist() == [[0, 2]]
    assert len(comparisons) == 2


def test_near_duplicates_are_joined_unless_they_are_many() -> None:
    hashes = [b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h", b"i", b"j", b"k", b"l", b"m", b"n", b"o"]
    pairs = np.array([[0, 1], [1, 2]])
    assert join_near_duplicates(pairs, hashes) == [b"a", b"a", b"a", *hashes[3:]]
    assert "3 of 15 images are near-duplicates" in describe_near_duplicates(pairs, 15)[0]
    both = describe_near_duplicates(np.array([[0, 20], [1, 21]]), 20, 10)
    assert both[1].startswith("2 of 10 test images are near-duplicates of training images")
    many = np.array([[0, 1], [2, 3]])
    assert join_near_duplicates(many, hashes) == hashes
    assert "as frames of a video are" in describe_near_duplicates(many, 15)[0]


def test_no_near_duplicate_of_a_test_image_is_trained_on(tmp_path: Path) -> None:
    """They were on both sides of a split, without a word."""
    pictures = make_pictures(40)
    for row, picture in enumerate(pictures):
        folder = tmp_path / "ab"[row % 2]
        folder.mkdir(exist_ok=True)
        picture.save(folder / f"{row:02}.png")
        if row < 4:
            picture.resize((90, 90)).save(folder / f"{row:02}-large.jpg", quality=80)
    source = load(str(tmp_path), preparation=Preparation((64, 64), 3))
    assert source.notes == (
        "8 of 44 images are near-duplicates (one picture at several sizes or compressions): all are on one side of a split",
    )
    images = [*source.train.images, *source.test.images]
    sides = [0] * len(source.train) + [1] * len(source.test)
    pairs = find_near_duplicates([np.stack(images)], hash_pixels(np.stack(images)))
    assert len(pairs) == 4
    assert all(sides[first] == sides[second] for first, second in pairs)
    copies = [compress(picture, 70) for picture in pictures[:4]]
    data = make_memory_data(([*pictures, *copies], [*(row % 2 for row in range(40)), 0, 1, 0, 1]))
    assert "near-duplicates" in load_memory(register(data)).notes[0]


def test_frames_of_a_video_are_counted_without_comparing_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 noisy frames of one picture are 44,850 pairs; each frame is compared with its nearest ones only."""
    rng = np.random.default_rng(0)
    picture = rng.integers(30, 220, (32, 32, 1))
    frames = (picture + rng.integers(-1, 2, (300, 32, 32, 1))).astype(np.uint8)
    hashes = [bytes([row // 256, row % 256]) for row in range(300)]
    pairs = find_near_duplicates([frames], hashes)
    assert 300 / 2 <= len(pairs) <= 300 * near_duplicates.NEAREST_CANDIDATES
    assert len(np.unique(pairs)) == 300
    assert (pairs[:, 0] < pairs[:, 1]).all()
    monkeypatch.setattr(near_duplicates, "MAX_PAIRS_PER_IMAGE", 1000)
    near_duplicates._LAST_PAIRS.clear()
    every_pair = find_near_duplicates([frames], hashes)
    assert len(every_pair) > 40_000
    assert set(map(tuple, pairs.tolist())) <= set(map(tuple, every_pair.tolist()))
