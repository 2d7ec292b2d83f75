"""Attributes of DICOM files that change the meaning of a pixel are applied as pydicom applies them, or refused."""

import io
from pathlib import Path

import numpy as np
import pytest
from support.scripts import load_script

from halfmoon.core.errors import ImageReadError
from halfmoon.data import dicom
from halfmoon.data.preparation import Preparation
from halfmoon.data.readers.decode import decode_prepared, decode_to_shape
from halfmoon.pages.browser_images import encode_for_browser
from halfmoon.sites.folders.check import check_site

pytest.importorskip("pydicom")
files = load_script("benchmarks/dicom_files.py")
GENERATED = files.generated_files()

REFUSED = {
    "high bit 15 of 12 bits": "High Bit 15",
    "YBR_PARTIAL_422": "Photometric Interpretation is not supported",
    "HSV": "Photometric Interpretation is not supported",
    "no photometric interpretation": "does not state its Photometric Interpretation",
    "unknown window function": "VOI LUT Function is unknown",
    "MONOCHROME2 with INVERSE": "Presentation LUT Shape contradicts",
    "colors for some grays": "stands for colors",
    "signed colors": "colors are signed",
}


@pytest.mark.parametrize("name", [name for name in GENERATED if name not in REFUSED])
def test_grays_and_colors_are_those_of_pydicom(name: str):
    """Half a level for rounding; a whole one for colors of more than 8 bits, whose low bits are dropped."""
    expected = files.pydicom_grays(GENERATED[name])
    found = decode_prepared(GENERATED[name], "file", Preparation())
    if expected is None:
        assert "without a window" in name
        return
    assert np.abs(np.clip(expected, 0, 255) - found).max() <= (1 if name == "RGB of 12 bits" else 0.501)
    assert found.std() > 20  # the comparison is not one of two black images


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_applied_is_refused(name: str):
    with pytest.raises(ImageReadError, match=f"^file: .*{REFUSED[name]}.*; convert, replace or remove it.$"):
        decode_prepared(GENERATED[name], "file", Preparation())


@pytest.mark.parametrize(
    ("bits", "values", "expected"),
    [
        (4, [0, 8, 15], [0, 136, 255]),  # 255 / 15 = 17
        (8, [0, 127, 255], [0, 127, 255]),
        (12, [15, 2047, 4095], [0, 127, 255]),  # the highest 8 bits: 2047 / 16 is not rounded up
    ],
)
def test_colors_have_eight_bits(bits: int, values: list[int], expected: list[int]):
    image = dicom._make_color_image(np.array([[values, [*reversed(values)]]], np.uint16), bits)
    assert np.asarray(image).tolist() == [[expected, [*reversed(expected)]]]


@pytest.mark.parametrize(("kind", "expected"), [("RGB", 9), ("YBR_FULL", 36), ("MONOCHROME2", 8)])
def test_the_bytes_of_a_pixel_follow_from_the_header(kind: str, expected: int, tmp_path: Path):
    """Without compression: conversions of color spaces need the most memory, gray images the least."""
    pixels = np.zeros((4, 4) if kind == "MONOCHROME2" else (4, 4, 3), np.uint8)
    (tmp_path / "file.dcm").write_bytes(files.make_file(pixels, PhotometricInterpretation=kind))
    gray = kind == "MONOCHROME2"
    assert dicom.read_header(tmp_path / "file.dcm", "file") == (4, 4, gray, 1, expected)


def test_padding_does_not_widen_an_estimated_window():
    """Grays from 1000 to 2000 with a border of 60000: the lightest gray is white, and the border is black."""
    pixels = np.linspace(1000, 2000, 32 * 32).astype(np.uint16).reshape(32, 32)
    pixels[:2] = 60000
    for extra in ({}, {"PhotometricInterpretation": "MONOCHROME1"}):
        data = files.make_file(pixels, PixelPaddingValue=60000, **extra)
        found = decode_prepared(data, "file", Preparation())[..., 0]
        assert (found[:2] == 0).all()
        assert found[2:].max() == 255
        assert 120 < found[2:].mean() < 136


def test_an_image_of_padding_only_is_read():
    data = files.make_file(np.full((4, 4), 5, np.uint16), PixelPaddingValue=5)
    assert decode_prepared(data, "file", Preparation()).shape == (4, 4, 1)


def test_padding_of_floats():
    pixels = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    pixels[0] = -99
    data = files.make_file(
        pixels, PixelData=None, FloatPixelData=pixels.tobytes(), BitsAllocated=32, FloatPixelPaddingValue=-99.0
    )
    found = decode_prepared(data, "file", Preparation())[..., 0]
    assert (found[0] == 0).all()
    assert found[1:].min() < 10
    assert found[1:].max() == 255


@pytest.mark.parametrize("name", ["presentation table", "window, function SIGMOID"])
def test_a_window_of_the_user_replaces_a_table_and_a_sigmoid(name: str, tmp_path: Path):
    """It applies to the values before these: the same grays as of a file without them."""
    plain = decode_to_shape(GENERATED["window"], "file", 24, 32, 1, window=(500, 2500))
    assert (decode_to_shape(GENERATED[name], "file", 24, 32, 1, window=(500, 2500)) == plain).all()
    assert (decode_to_shape(GENERATED[name], "file", 24, 32, 1) != plain).any()
    shown = []
    for each in ("window", name):
        (tmp_path / "file.dcm").write_bytes(GENERATED[each])
        shown.append(encode_for_browser(tmp_path / "file.dcm", "file", window=(500, 2500)))
    assert shown[0] == shown[1]


@pytest.mark.parametrize("color", [False, True])
def test_gray_and_color_files_of_several_frames_are_listed(color: bool, tmp_path: Path):
    frames = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3) if color else (3, 8, 8)).astype(np.uint8)
    data = files.make_file(frames[0], NumberOfFrames=3, PixelData=frames.tobytes(), Modality="US")
    image = dicom.read(io.BytesIO(data), "file")
    assert (image.info["frames"], image.info["modality"]) == (3, "US")
    (tmp_path / "a.dcm").write_bytes(data)
    found = {finding.kind: finding for finding in check_site(tmp_path).findings}
    assert found["files of several frames"].names == ("a.dcm",)


def test_all_files_of_pydicom_are_equal_to_pydicoms_pipeline_or_refused():
    """The table of results/dicom_files.md, for the files whose black and white are defined."""
    compared = 0
    for path in sorted(files.FILES.rglob("*")):
        if not path.is_file() or not dicom.holds_image(path):
            continue
        kind, line = files.read_file(path)
        difference = line.split("|")[-2].strip()
        if kind == "read" and difference[:1].isdigit():
            assert float(difference) <= (1 if "PALETTE" in line else 0.501), line
            compared += 1
    assert compared >= 60
