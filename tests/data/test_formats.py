"""GIF, AVIF and HEIC images, and the messages where a decoder is missing."""

import io
from pathlib import Path

import numpy as np
import pytest
from image_files import encode_image
from PIL import Image

from halfmoon import UserError
from halfmoon.data.groups import describe_equal_images
from halfmoon.data.readers import formats
from halfmoon.data.readers.decode import decode_to_shape, read_header

HEIC_HEAD = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40)
AVIF_HEAD = b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf" + bytes(40)
RAMP = np.tile(np.arange(0, 256, 8, np.uint8)[:, None], (1, 16))  # (32, 16): dark at the top


def test_the_first_frame_of_a_gif_is_read(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(RAMP).save(file, "GIF", save_all=True, append_images=[Image.fromarray(255 - RAMP)])
    np.testing.assert_array_equal(decode_to_shape(file.getvalue(), "a", 32, 16, 1)[:, :, 0], RAMP)
    (tmp_path / "a.gif").write_bytes(file.getvalue())
    assert read_header(tmp_path / "a.gif") is not None
    assert ".gif" in formats.list_suffixes()


def test_a_missing_decoder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "has_heif", lambda: False)
    monkeypatch.setattr(formats, "has_avif", lambda: False)
    with pytest.raises(UserError, match=r"^x\.heic: HEIC images need pillow-heif; pip install 'halfmoon\[heif\]'"):
        decode_to_shape(HEIC_HEAD, "x.heic", 8, 8, 3)
    with pytest.raises(UserError, match=r"^x\.avif: AVIF images need Pillow 11\.3 or later"):
        decode_to_shape(AVIF_HEAD, "x.avif", 8, 8, 3)
    assert not {".heic", ".heif", ".avif"} & {*formats.list_suffixes()}


@pytest.mark.skipif(not formats.has_avif(), reason="this Pillow has no AVIF decoder")
def test_avif_is_read() -> None:
    pixels = decode_to_shape(encode_image(RAMP, "AVIF", quality=100), "a", 32, 16, 1)[:, :, 0]
    assert np.abs(pixels.astype(int) - RAMP).max() <= 3
    assert ".avif" in formats.list_suffixes()
    with pytest.raises(UserError, match="not a readable image"):
        decode_to_shape(AVIF_HEAD, "a", 8, 8, 3)


def test_heic_is_read(tmp_path: Path) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    upright = np.repeat(RAMP[:, :, None], 3, 2)
    exif = Image.Exif()
    exif[0x0112] = 6  # the upright image is the stored one after a quarter turn clockwise
    stored = Image.fromarray(np.ascontiguousarray(np.rot90(upright)))
    pillow_heif.from_pillow(stored).save(tmp_path / "a.heic", quality=100, exif=exif.tobytes())
    pixels = decode_to_shape((tmp_path / "a.heic").read_bytes(), "a", 32, 16, 3)
    assert np.abs(pixels.astype(int) - upright).max() <= 6
    assert (read_header(tmp_path / "a.heic") or ())[:2] == (32, 16)
    with pytest.raises(UserError, match="not a readable image"):
        decode_to_shape(HEIC_HEAD, "a", 8, 8, 3)


def test_a_large_jpeg_is_reduced_while_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    ramp = np.tile(np.arange(0, 256, 8, np.uint8)[:, None], (1, 32))
    whole = decode_to_shape(encode_image(ramp, "JPEG", quality=95), "a", 8, 8, 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)  # of 1,024
    reduced = decode_to_shape(encode_image(ramp, "JPEG", quality=95), "a", 8, 8, 1)
    assert np.abs(reduced.astype(int) - whole).max() <= 12
    with pytest.raises(UserError, match="too large to open safely"):
        decode_to_shape(encode_image(ramp), "a", 8, 8, 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(UserError, match="too large to open safely"):
        decode_to_shape(encode_image(ramp, "JPEG"), "a", 8, 8, 1)


def test_a_folder_of_one_repeated_image_is_described() -> None:
    labels = np.array([0, 0, 1, 1])
    assert describe_equal_images([b"a"] * 4, labels) == [
        "all 4 images have equal pixels, so no class can be learned: export them again, without a transparency "
        "channel, which is not read"
    ]
    assert "1 of 4 images are copies" in describe_equal_images([b"a", b"a", b"b", b"c"], labels)[0]
    assert describe_equal_images([b"a"], labels[:1]) == []
