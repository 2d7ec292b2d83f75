"""Any image file becomes the wanted size and channels: oracles are numpy, Pillow's own arithmetic and known files."""

import io
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from halfmoon.core.errors import UserError
from halfmoon.data.readers.decode import fitted

rng = np.random.default_rng(0)
GRAY = rng.integers(0, 256, (8, 6), np.uint8)
RGB = rng.integers(0, 256, (8, 6, 3), np.uint8)


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize(("form", "options"), [("PNG", {}), ("TIFF", {}), ("BMP", {}), ("WEBP", {"lossless": True})])
def test_exact_pixels_are_kept(form: str, options: dict[str, bool]) -> None:
    assert np.array_equal(fitted(encoded(Image.fromarray(RGB), form, **options), "a", 8, 6, 3), RGB)
    if form != "WEBP":  # it has no gray
        assert np.array_equal(fitted(encoded(Image.fromarray(GRAY), form), "a", 8, 6, 1)[:, :, 0], GRAY)


def test_gray_becomes_three_equal_channels_and_alpha_is_left_out() -> None:
    assert np.array_equal(fitted(encoded(Image.fromarray(GRAY)), "a", 8, 6, 3), np.repeat(GRAY[:, :, None], 3, 2))
    alpha = Image.fromarray(rng.integers(0, 256, (8, 6), np.uint8))
    seen, gray = Image.fromarray(RGB), Image.fromarray(GRAY)
    seen.putalpha(alpha)
    gray.putalpha(alpha)
    assert (seen.mode, gray.mode) == ("RGBA", "LA")
    assert np.array_equal(fitted(encoded(seen), "a", 8, 6, 3), RGB)
    assert np.array_equal(fitted(encoded(gray), "a", 8, 6, 1)[:, :, 0], GRAY)


def test_rgb_becomes_gray_by_luma() -> None:
    """ITU-R 601: 0.299 R + 0.587 G + 0.114 B, to one gray level."""
    gray = fitted(encoded(Image.fromarray(RGB)), "a", 8, 6, 1)[:, :, 0]
    assert np.abs(gray - RGB @ np.array([0.299, 0.587, 0.114])).max() <= 1


def test_palette_bilevel_and_cmyk() -> None:
    palette = Image.fromarray(np.array([[0, 1], [1, 0]], np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert fitted(encoded(palette), "a", 2, 2, 3)[0].tolist() == [[10, 20, 30], [40, 50, 60]]
    bits = Image.fromarray(GRAY).convert("1")
    assert np.array_equal(fitted(encoded(bits), "a", 8, 6, 1)[:, :, 0], np.asarray(bits) * 255)
    # No ink is white; full cyan takes all red.
    ink = Image.fromarray(np.array([[[0, 0, 0, 0], [255, 0, 0, 0]]], np.uint8), "CMYK")
    assert fitted(encoded(ink, "TIFF"), "a", 1, 2, 3)[0].tolist() == [[255, 255, 255], [0, 255, 255]]


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_cut_off(form: str) -> None:
    """255 / 65535 = 1 / 257: 257 k becomes k, and everything within half a step of it (+-128) does."""
    deep = np.array([[0, 128, 129, 257, 25700, 65535]], np.uint16)
    assert fitted(encoded(Image.fromarray(deep), form), "a", 1, 6, 1)[0, :, 0].tolist() == [0, 0, 1, 1, 100, 255]
    assert fitted(encoded(Image.fromarray(deep), form), "a", 1, 6, 3)[0, 4].tolist() == [100, 100, 100]


def test_pixels_without_a_range_are_refused() -> None:
    for pixels in (np.ones((2, 2), np.float32), np.array([[0, 70000]], np.int32)):
        with pytest.raises(UserError, match=r"^a: its pixels have 32 bits and no known range; convert"):
            fitted(encoded(Image.fromarray(pixels), "TIFF"), "a", 2, 2, 1)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF"])
def test_the_orientation_tag_turns_the_image(form: str) -> None:
    """Orientation 6: the first row of the file is the right column of the scene, so it is turned clockwise."""
    exif = Image.Exif()
    exif[0x0112] = 6
    blocks = np.kron(np.array([[0, 255], [100, 200]], np.uint8), np.ones((16, 8), np.uint8))  # (32, 16)
    got = fitted(encoded(Image.fromarray(blocks), form, exif=exif), "a", 16, 32, 1)[:, :, 0]
    assert np.abs(got.astype(int) - np.rot90(blocks, -1)).max() <= (8 if form == "JPEG" else 0)


def test_resampling_is_antialiased() -> None:
    """Halving with a triangle of radius 2 pixels: weights (1, 3, 3, 1) / 8 inside; stripes 0, 255 become 127 or 128."""
    stripes = np.tile(np.array([0, 255], np.uint8), (16, 16))
    small = fitted(encoded(Image.fromarray(stripes)), "a", 8, 16, 1)[:, 1:-1, 0]
    assert set(small.ravel().tolist()) <= {127, 128}
    assert fitted(encoded(Image.fromarray(GRAY)), "a", 3, 50, 3).shape == (3, 50, 3)


def test_damage_is_a_sentence_with_the_name() -> None:
    whole = encoded(Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)), "JPEG")
    for data in (whole[: len(whole) // 2], b"", b"no image", encoded(Image.fromarray(RGB))[:60]):
        with pytest.raises(UserError, match=r"^x/y\.png: not a readable image .*; replace or remove it\.$"):
            fitted(data, "x/y.png", 8, 8, 3)


def test_a_bomb_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    with pytest.raises(UserError, match=r"^a: the image is too large to open safely"):
        fitted(encoded(Image.fromarray(GRAY)), "a", 8, 6, 1)


def test_other_formats_are_not_opened() -> None:
    with pytest.raises(UserError, match=r"^a: not a readable image \(no known format\)"):
        fitted(encoded(Image.fromarray(GRAY), "GIF"), "a", 8, 6, 1)


def test_damaged_files_never_raise_anything_else() -> None:
    draw = np.random.default_rng(1)
    for form in ("PNG", "TIFF", "JPEG", "WEBP", "BMP"):
        whole = np.frombuffer(encoded(Image.fromarray(RGB), form), np.uint8)
        for _ in range(60):
            broken = whole.copy()
            broken[draw.integers(0, len(broken), 3)] = draw.integers(0, 256, 3)
            with suppress(UserError):
                assert fitted(broken.tobytes(), "a", 4, 4, 3).shape == (4, 4, 3)
